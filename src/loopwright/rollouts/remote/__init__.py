"""Remote agents: somebody else's program or function attempts a task, and a gateway captures it token by token."""
