"""Slurm: trials are jobs of a cluster, or steps of one allocation."""
