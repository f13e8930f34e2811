"""The ledger: a run's crash-safe record, with its cache, groups and training steps."""
