"""Trainers: agents that make a policy better by what it did. Torch is imported late, where it is worked with."""
