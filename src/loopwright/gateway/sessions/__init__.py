"""Sessions: an agent's conversation with an engine, recorded token by token."""
