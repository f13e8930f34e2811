"""Trials as local processes, and Python workers that can be killed."""
