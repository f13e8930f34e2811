"""Reports, made from ledgers alone."""
