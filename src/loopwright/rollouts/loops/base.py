"""Agent loops: how one task becomes one episode."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from loopwright.core.episode import Episode
from loopwright.core.errors import Problem
from loopwright.core.outcome import Outcome
from loopwright.core.registry import Registry
from loopwright.core.task import Task
from loopwright.engines.base import Sampling
from loopwright.gateway.sessions.session import Session, SessionLimits
from loopwright.rollouts.pools.resources import PlacementConfig


class LoopConfig(PlacementConfig):
    """What every agent loop can be told."""

    evidence: ClassVar[tuple[str, ...]] = ()
    """What its episodes hold for judgers, by name."""
    type: str
    sampling: Sampling = Sampling()
    """How the policy is sampled."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Seconds for one rollout, from its start to its episode."""
    max_turns: int | None = Field(default=None, ge=1)
    """How many turns the policy has; a rollout that wants more is `truncated`, and is scored as it stands."""
    max_tokens: int | None = Field(default=None, ge=1)
    """How many tokens it may sample over all turns."""
    concurrency: int = Field(default=64, ge=1)
    """How many rollouts are in flight at a time, over all workers."""

    def limits(self) -> SessionLimits:
        """What a session of this loop may use."""
        return SessionLimits(self.max_turns, self.max_tokens)

    def problems(self, home: Path) -> list[Problem]:
        """What is wrong with it; found before anything starts."""
        return []

    def task_problem(self, task: Task, home: Path) -> str:
        """What a task lacks for this loop to bring evidence home; nothing if it can. Asked where a judger needs it."""
        return ""

    def exposes(self, path: Path, home: Path) -> bool:
        """Whether an agent could read, in its sandbox, what is at this path or a part of it."""
        return False


class Loop:
    """How one task becomes one episode: a config of its own, chosen by its `type`."""

    Config: ClassVar[type[LoopConfig]] = LoopConfig

    def __init__(self, config: Any, home: Path) -> None:
        self.config, self.home = config, home


class AgentLoop(Loop, ABC):
    """Drives a policy through a task. One loop serves many rollouts at a time: what belongs to one stays in `run`.

    class Twice(AgentLoop):
        async def run(self, task: Task, session: Session) -> Episode:
            first = await session.turn(task.messages)
            again = {"role": "user", "content": "Are you sure?"}
            await session.turn([*task.messages, first.message, again])
            return session.episode(task)

    An exception costs this rollout and no other; it is tried once more elsewhere.
    """

    @abstractmethod
    async def run(self, task: Task, session: Session) -> Episode:
        """Attempt the task."""

    async def close(self) -> None:
        """Let go of everything."""


class SingleTurnConfig(LoopConfig):
    """The task's messages in, one answer out."""

    type: Literal["single_turn"] = "single_turn"


class SingleTurn(AgentLoop):
    """Asks once."""

    Config: ClassVar[type[LoopConfig]] = SingleTurnConfig

    async def run(self, task: Task, session: Session) -> Episode:
        turn = await session.turn(task.messages)
        return out_of_tokens(task, session) if turn.finish == "length" else session.episode(task)


def out_of_tokens(task: Task, session: Session) -> Episode:
    """The episode of a policy that did not come to an end within its tokens; it is scored as it stands."""
    return session.episode(task, Outcome.TRUNCATED, reason="a turn ran out of tokens")


def describe_error(error: BaseException) -> str:
    """An exception of the user's own in a line, whatever its `__str__` does."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  what it would have said is lost, but nothing else
        return type(error).__name__


loops: Registry[type[Loop]] = Registry("agent loop", "loopwright.loops", Loop)
loops.add("single_turn", SingleTurn)
loops.add_lazily("tools", "loopwright.rollouts.loops.tools:ToolLoop")
loops.add_lazily("remote", "loopwright.rollouts.remote.config:RemoteLoop")


def agent_loop(config: LoopConfig, home: Path) -> AgentLoop:
    """The loop that a config describes, if it is one that drives a session of ours."""
    made = loops.get(config.type)(config, home)
    if not isinstance(made, AgentLoop):
        raise TypeError(f"agent loop {config.type!r} works through a gateway; it has no session of ours to drive")
    return made
