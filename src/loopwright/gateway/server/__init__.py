"""The gateway's HTTP server: routes, keys, metrics and administration."""
