"""Loopwright: a trial runtime for agents that learn by doing.

    import loopwright
    from pathlib import Path

    code = loopwright.dispatch(loopwright.load(Path("study.toml")), Path("out"))
    with loopwright.Ledger.read(Path("out/matmul/ledger.db")) as ledger:
        best = max((t for t in ledger.trials() if t.reward), key=lambda t: t.reward.value)

Names are imported when they are first used, so that `import loopwright` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loopwright.agents.search.base import Env, SearchAgent
    from loopwright.core.agent import Agent, AgentConfig
    from loopwright.core.errors import LoopwrightError, ScenarioError
    from loopwright.core.outcome import Fault, Outcome
    from loopwright.core.reward import Reward, RewardFunction
    from loopwright.core.trial import Feedback, Observation, Result, Trial
    from loopwright.engines.shortcuts import engine_of
    from loopwright.envs.gym.adapter import GymnasiumAdapter
    from loopwright.envs.gym.observation import ObsLeafDescriptor, StructuredObservation
    from loopwright.envs.live.server import GymServer
    from loopwright.gateway.gateway import Gateway
    from loopwright.ledger.ledger import Ledger
    from loopwright.ledger.observer import Observer
    from loopwright.scenario.dispatch import dispatch
    from loopwright.scenario.load import load
    from loopwright.scenario.make import make
    from loopwright.spaces.parameter import ContinuousSpace
    from loopwright.spaces.space import Space
    from loopwright.workloads.base import Job, Workload, WorkloadConfig

_HOMES = {
    "Agent": "core.agent",
    "AgentConfig": "core.agent",
    "ContinuousSpace": "spaces.parameter",
    "Env": "agents.search.base",
    "Fault": "core.outcome",
    "Feedback": "core.trial",
    "Gateway": "gateway.gateway",
    "GymServer": "envs.live.server",
    "GymnasiumAdapter": "envs.gym.adapter",
    "Job": "workloads.base",
    "Ledger": "ledger.ledger",
    "LoopwrightError": "core.errors",
    "ObsLeafDescriptor": "envs.gym.observation",
    "Observation": "core.trial",
    "Observer": "ledger.observer",
    "Outcome": "core.outcome",
    "Result": "core.trial",
    "Reward": "core.reward",
    "RewardFunction": "core.reward",
    "ScenarioError": "core.errors",
    "SearchAgent": "agents.search.base",
    "Space": "spaces.space",
    "StructuredObservation": "envs.gym.observation",
    "Trial": "core.trial",
    "Workload": "workloads.base",
    "WorkloadConfig": "workloads.base",
    "dispatch": "scenario.dispatch",
    "engine_of": "engines.shortcuts",
    "load": "scenario.load",
    "make": "scenario.make",
}

__all__ = [
    "Agent",
    "AgentConfig",
    "ContinuousSpace",
    "Env",
    "Fault",
    "Feedback",
    "Gateway",
    "GymServer",
    "GymnasiumAdapter",
    "Job",
    "Ledger",
    "LoopwrightError",
    "ObsLeafDescriptor",
    "Observation",
    "Observer",
    "Outcome",
    "Result",
    "Reward",
    "RewardFunction",
    "ScenarioError",
    "SearchAgent",
    "Space",
    "StructuredObservation",
    "Trial",
    "Workload",
    "WorkloadConfig",
    "dispatch",
    "engine_of",
    "load",
    "make",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(_home(name), name)
    raise AttributeError(f"module 'loopwright' has no attribute {name!r}")


def _home(name: str) -> Any:
    try:
        return import_module(f"loopwright.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name != "gymnasium":
            raise
        from loopwright.core.errors import MissingExtra

        raise MissingExtra(name, "rl") from error
