"""Environments of other frameworks: a source whose tasks come with their own loop and judger.

A framework's adapter has a source, which lists the tasks, and an async function `attempt`, which runs one of them
through a session of the gateway and returns the framework's own score.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from loopwright.rollouts.tasks.sources import TasksConfig


class EnvironmentTasks(TasksConfig):
    """A source that is somebody else's environment."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""
    limit: int | None = Field(default=None, ge=1)
    """How many of its tasks are used; without it, all."""


def brings(attempt: str) -> Mapping[str, Mapping[str, Any]]:
    """The loop that attempts tasks with the function `module:attempt`, and the judger that reads its score."""
    return {
        "loop": {"type": "remote", "function": attempt, "concurrency": 64},
        "judger": {"type": "environment"},
    }


def environment_score(parts: Mapping[str, float], metrics: Mapping[str, Any], reward: float | None = None) -> Any:
    """What `attempt` returns for the judger: parts that count, already weighted, and metrics that do not."""
    value = sum(parts.values()) if reward is None else reward
    return {"reward": float(value), "parts": dict(parts), "metrics": dict(metrics)}
