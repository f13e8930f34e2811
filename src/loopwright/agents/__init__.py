"""Search and RL agents, one file per family; the registry imports each when it is first named."""

from loopwright.core.agent import agents

for _name, _path in {
    "grid": "simple:Grid",
    "random": "simple:RandomSearch",
    "tpe": "samplers:Tpe",
    "gp": "samplers:Gp",
    "cmaes": "samplers:Cmaes",
    "nsga2": "samplers:Nsga2",
    "bandit": "bandit:Bandit",
    "ppo": "rl:Ppo",
    "a2c": "rl:A2c",
    "dqn": "rl:Dqn",
    "sac": "rl:Sac",
}.items():
    agents.add_lazily(_name, f"loopwright.agents.{_path}")
agents.add_lazily("collect", "loopwright.rollouts.collect:Collect")
agents.add_lazily("grpo", "loopwright.trainers.grpo:Grpo")
agents.add_lazily("rloo", "loopwright.trainers.rloo:Rloo")

__all__ = ["agents"]
