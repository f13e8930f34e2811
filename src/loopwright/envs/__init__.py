"""Environments: what an agent acts on."""
