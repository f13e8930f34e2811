"""The Python front door: `tune`, `run`, `rollout` and `Study`. Users import these names from `loopwright` itself."""
