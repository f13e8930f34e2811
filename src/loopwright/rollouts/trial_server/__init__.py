"""Trials for trainers elsewhere: a server that queues and runs them, and the loop that has them run there."""
