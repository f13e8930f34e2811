"""Pools of Ray actors."""
