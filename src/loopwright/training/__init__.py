"""How a policy gets better: rows of episodes in, new weights out. Knows nothing of runs, trials or pools."""
