"""The report of a search run."""
