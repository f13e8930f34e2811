"""Rollouts: agent loops make episodes of tasks, judgers score them, a manager keeps a trainer supplied."""
