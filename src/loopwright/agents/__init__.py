"""Search agents, one file per family."""
