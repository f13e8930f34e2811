"""Search and RL agents, one file per family; the registry imports each when it is first named."""

from loopwright.core.agent import agents

for _name, _path in {
    "grid": "search.grid_random:Grid",
    "random": "search.grid_random:RandomSearch",
    "tpe": "search.samplers:Tpe",
    "gp": "search.samplers:Gp",
    "cmaes": "search.samplers:Cmaes",
    "nsga2": "search.samplers:Nsga2",
    "bandit": "search.bandit:Bandit",
    "ppo": "rl.agent:Ppo",
    "a2c": "rl.agent:A2c",
    "dqn": "rl.agent:Dqn",
    "sac": "rl.agent:Sac",
}.items():
    agents.add_lazily(_name, f"loopwright.agents.{_path}")
agents.add_lazily("collect", "loopwright.rollouts.collect:Collect")
agents.add_lazily("grpo", "loopwright.trainers.grpo:GrpoTrainer")
agents.add_lazily("rloo", "loopwright.trainers.rloo:RlooTrainer")

__all__ = ["agents"]
