"""Loopwright: a trial runtime for agents that learn by doing.

    import loopwright as lw

    study = lw.tune(train, {"lr": lw.log(1e-5, 1e-1), "layers": [1, 2, 4]}, minimize="loss", trials=100)
    study.best.params, study.best.interval

Names are imported when they are first used, so `import loopwright` costs nothing.
"""

from typing import TYPE_CHECKING

from loopwright.core.imports import lazy_exports

if TYPE_CHECKING:
    from loopwright.agents.search.base import Env, SearchAgent
    from loopwright.api.ask_tell import PendingTrial
    from loopwright.api.producer import Producer
    from loopwright.api.rollout import rollout
    from loopwright.api.study import BestResult, NoResult, Study, Trials
    from loopwright.api.tune import integer, log, run, tune, uniform
    from loopwright.core.agent import Agent, AgentConfig
    from loopwright.core.config import Config
    from loopwright.core.episode import Episode
    from loopwright.core.errors import LoopwrightError, ScenarioError
    from loopwright.core.outcome import Fault, Outcome
    from loopwright.core.progress import TrialStopped, report
    from loopwright.core.task import Task
    from loopwright.core.trial import Feedback, Observation, Result, Reward, RewardFunction, Trial
    from loopwright.engines.base import Engine, EngineConfig, Sampling
    from loopwright.engines.shortcuts import engine_of
    from loopwright.envs.gym.adapter import GymnasiumAdapter
    from loopwright.envs.gym.observation import ObsLeafDescriptor, StructuredObservation
    from loopwright.envs.live.server import GymServer
    from loopwright.envs.replay import replay
    from loopwright.gateway.gateway import Gateway
    from loopwright.gateway.sessions.session import Session
    from loopwright.ledger.ledger import Ledger
    from loopwright.ledger.trial_book import Observer
    from loopwright.rollouts.judgers.base import Judger, JudgerConfig, Payload
    from loopwright.rollouts.loops.base import AgentLoop, LoopConfig
    from loopwright.rollouts.tasks.sources import TasksConfig
    from loopwright.scenario.dispatch import dispatch, load
    from loopwright.scenario.make import make
    from loopwright.spaces.parameter import ContinuousSpace
    from loopwright.spaces.space import Space
    from loopwright.workloads.base import Job, Workload, WorkloadConfig


__all__ = [
    "Agent",
    "AgentConfig",
    "AgentLoop",
    "BestResult",
    "Config",
    "ContinuousSpace",
    "Engine",
    "EngineConfig",
    "Env",
    "Episode",
    "Fault",
    "Feedback",
    "Gateway",
    "GymServer",
    "GymnasiumAdapter",
    "Job",
    "Judger",
    "JudgerConfig",
    "Ledger",
    "LoopConfig",
    "LoopwrightError",
    "NoResult",
    "ObsLeafDescriptor",
    "Observation",
    "Observer",
    "Outcome",
    "Payload",
    "PendingTrial",
    "Producer",
    "Result",
    "Reward",
    "RewardFunction",
    "Sampling",
    "ScenarioError",
    "SearchAgent",
    "Session",
    "Space",
    "StructuredObservation",
    "Study",
    "Task",
    "TasksConfig",
    "Trial",
    "TrialStopped",
    "Trials",
    "Workload",
    "WorkloadConfig",
    "dispatch",
    "engine_of",
    "integer",
    "load",
    "log",
    "make",
    "replay",
    "report",
    "rollout",
    "run",
    "tune",
    "uniform",
]

__getattr__ = lazy_exports(__name__)
