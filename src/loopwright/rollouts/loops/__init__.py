"""Agent loops: how a task becomes an episode."""
