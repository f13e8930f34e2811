"""Loopwright: a trial runtime for agents that learn by doing."""
