"""Search agents: they propose parameters and learn from the metrics."""
