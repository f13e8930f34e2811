"""The kinds of run: search, live, rollout and training. Each reads, checks, builds and describes its runs."""
