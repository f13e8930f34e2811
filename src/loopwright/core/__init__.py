"""The spine: trials, outcomes, rewards, the ledger, and the bases of all agents and environments."""
