"""Spaces: parameters, constraints, draws and encodings."""
