"""RL agents: policies trained by Stable-Baselines3 or RLlib."""
