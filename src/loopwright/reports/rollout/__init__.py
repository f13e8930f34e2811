"""The report of a rollout run."""
