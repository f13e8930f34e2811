"""Workloads: what a trial runs."""
