"""Search and RL agents, one file per family; the registries import each when it is first named."""

from typing import TYPE_CHECKING

from loopwright.core.agent import Agent, AgentConfig, agents, rollout_agents
from loopwright.core.imports import lazy_exports

if TYPE_CHECKING:
    from loopwright.agents.search.base import BudgetedConfig, SearchAgent, SearchConfig, SpaceAgent

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
    "td3": "rl.agent:Td3",
    "maskable_ppo": "rl.agent:MaskablePpo",
    "sb3": "rl.agent:Sb3",
}.items():
    agents.add_lazily(_name, f"loopwright.agents.{_path}")
for _name, _path in {
    "collect": "rollouts.collect:Collect",
    "grpo": "trainers.grpo:GrpoTrainer",
    "rloo": "trainers.rloo:RlooTrainer",
    "ppo": "trainers.ppo:PpoTrainer",
}.items():
    rollout_agents.add_lazily(_name, f"loopwright.{_path}")

__all__ = [
    "Agent",
    "AgentConfig",
    "BudgetedConfig",
    "SearchAgent",
    "SearchConfig",
    "SpaceAgent",
    "agents",
    "rollout_agents",
]

__getattr__ = lazy_exports(__name__)
