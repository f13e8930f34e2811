"""Gymnasium: a run as a `gymnasium.Env`."""
