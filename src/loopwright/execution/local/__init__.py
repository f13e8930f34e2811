"""Trials as processes of this machine, and Python workers that can be killed."""
