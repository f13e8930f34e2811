"""The report of a live run."""
