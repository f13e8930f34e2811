"""The nouns and the small bases: trials, outcomes, rewards, episodes, tasks, agents, errors and configuration."""

from typing import TYPE_CHECKING

from loopwright.core.imports import lazy_exports

if TYPE_CHECKING:
    from loopwright.core.agent import Agent, AgentConfig
    from loopwright.core.config import Config
    from loopwright.core.episode import Attempt, Episode, Node, Row, Span
    from loopwright.core.errors import (
        InvalidAction,
        LaunchError,
        LedgerError,
        LoopwrightError,
        MissingExtra,
        OutputBusy,
        Problem,
        ScenarioError,
        StorageError,
    )
    from loopwright.core.outcome import Fault, Outcome
    from loopwright.core.registry import Registry
    from loopwright.core.task import Task
    from loopwright.core.trial import (
        Feedback,
        Observation,
        Penalties,
        Proposal,
        Result,
        Reward,
        RewardFunction,
        Trial,
        rewards,
    )

__all__ = [
    "Agent",
    "AgentConfig",
    "Attempt",
    "Config",
    "Episode",
    "Fault",
    "Feedback",
    "InvalidAction",
    "LaunchError",
    "LedgerError",
    "LoopwrightError",
    "MissingExtra",
    "Node",
    "Observation",
    "Outcome",
    "OutputBusy",
    "Penalties",
    "Problem",
    "Proposal",
    "Registry",
    "Result",
    "Reward",
    "RewardFunction",
    "Row",
    "ScenarioError",
    "Span",
    "StorageError",
    "Task",
    "Trial",
    "rewards",
]

__getattr__ = lazy_exports(__name__)
