"""Scenarios: from a TOML file to running objects."""
