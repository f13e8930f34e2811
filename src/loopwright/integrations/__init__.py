"""Loopwright inside other people's programs, one file each."""
