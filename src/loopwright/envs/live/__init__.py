"""Live environments: a server steps them, and each step is a trial."""
