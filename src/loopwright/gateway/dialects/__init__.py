"""Dialects: one API each, from request to internal turn and back."""
