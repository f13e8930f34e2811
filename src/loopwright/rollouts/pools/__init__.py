"""Pools: the same worker in this process, in one Ray actor, or in many."""
