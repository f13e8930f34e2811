"""Agent loops: how one task becomes one episode."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from loopwright.core.episode import Episode
from loopwright.core.errors import Problem
from loopwright.core.outcome import Outcome
from loopwright.core.registry import Registry, config_parser
from loopwright.core.task import Task
from loopwright.engines.base import Sampling
from loopwright.gateway.sessions.session import Session, SessionLimits
from loopwright.rollouts.pools.resources import PlacementConfig

_LEAST_SILENCE_S = 60.0
_SILENCES = 10
"""How much engine time a rollout has in all, in multiples of the longest silence."""


class LoopConfig(PlacementConfig):
    """The keys that every agent loop has."""

    evidence: ClassVar[tuple[str, ...]] = ()
    """The names of the evidence that its episodes contain for judgers."""
    through_gateway: ClassVar[bool] = False
    """Whether its agents sample through a gateway, so that it does not need its own engine."""
    type: str
    sampling: Sampling = Sampling()
    """How the policy is sampled."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Seconds for one rollout, from its start to its episode, without the time in which it waits for the engine."""
    engine_timeout_s: float | None = Field(default=None, gt=0)
    """Seconds without a token of the engine, for this rollout or any other, after which the rollout is lost; it is also
    lost if it needs ten times as many in all. By default `deadline_s`, and at least 60."""
    max_turns: int | None = Field(default=None, ge=1)
    """How many turns the policy has; a rollout that needs more is `truncated` and scored as it is."""
    max_tokens: int | None = Field(default=None, ge=1)
    """How many tokens it may sample over all turns."""
    concurrency: int = Field(default=64, ge=1)
    """How many rollouts are in flight at a time, over all workers."""

    @property
    def silence_s(self) -> float:
        """Seconds that an engine may sample no token; a machine that is busy is slow, not broken."""
        return self.engine_timeout_s or max(self.deadline_s, _LEAST_SILENCE_S)

    @property
    def engine_s(self) -> float:
        """Seconds that a rollout may wait for its engine in all."""
        return _SILENCES * self.silence_s

    @property
    def total_s(self) -> float:
        """Seconds after which a rollout is given up, however slow its engine is."""
        return self.deadline_s + self.engine_s

    def engine_failure(self, silent_s: float, engine_s: float) -> str:
        """Why a rollout is lost whose engine was silent for so long, and needed so long in all; empty if it is not."""
        if silent_s >= self.silence_s:
            return f"the engine sampled no token for {self.silence_s:g} s"
        hint = "if the policy may never end, set `max_turns` or `max_tokens`"
        return f"the engine needed more than {self.engine_s:g} s; {hint}" if engine_s >= self.engine_s else ""

    def limits(self) -> SessionLimits:
        """The limits of a session of this loop."""
        return SessionLimits(self.max_turns, self.max_tokens)

    def problems(self, scenario_dir: Path) -> list[Problem]:
        """What is wrong with this config; checked before anything starts."""
        return []

    def task_problem(self, task: Task, scenario_dir: Path) -> str:
        """Why this loop cannot record evidence for a task; empty if it can. Only used if a judger requires evidence."""
        return ""

    def refusal(self, task: Task) -> str:
        """Why this loop cannot attempt a task at all, so that the task is left out; empty if it can."""
        return ""

    def exposes(self, path: Path, scenario_dir: Path) -> bool:
        """Whether an agent could read this path, or a part of it, in its sandbox."""
        return False


class Loop:
    """What all loops share: their configuration. Subclass `AgentLoop`."""

    Config: ClassVar[type[LoopConfig]] = LoopConfig

    def __init__(self, config: Any = None, scenario_dir: Path = Path()) -> None:
        if config is None:
            config = LoopConfig(type=type(self).__name__) if self.Config is LoopConfig else self.Config()  # type: ignore[call-arg]
        self.config, self.scenario_dir = config, scenario_dir


class AgentLoop(Loop, ABC):
    """Drives a policy through a task. One loop runs many rollouts at a time, so the state of each stays in `run`.

    class Twice(AgentLoop):
        async def run(self, task: Task, session: Session) -> Episode:
            first = await session.turn(task.messages)
            again = {"role": "user", "content": "Are you sure?"}
            await session.turn([*task.messages, first.message, again])
            return session.episode(task)

    An exception fails only this rollout, which is attempted once more.
    """

    @abstractmethod
    async def run(self, task: Task, session: Session) -> Episode:
        """Attempt the task."""

    async def close(self) -> None:
        """Release all resources."""


class SingleTurnConfig(LoopConfig):
    """One turn: the task's messages in, one answer out."""

    type: Literal["single_turn"] = "single_turn"


class SingleTurn(AgentLoop):
    """Samples one turn."""

    Config: ClassVar[type[LoopConfig]] = SingleTurnConfig

    async def run(self, task: Task, session: Session) -> Episode:
        turn = await session.turn(task.messages)
        return truncated_episode(task, session) if turn.finish == "length" else session.episode(task)


def truncated_episode(task: Task, session: Session) -> Episode:
    """The episode of a policy that did not finish a turn within its token limit; it is scored as it is."""
    return session.episode(task, Outcome.TRUNCATED, reason="a turn ran out of tokens")


def describe_error(error: BaseException) -> str:
    """A user's exception in one line, whatever its `__str__` does; of a group, its first one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  only its text is lost
        return type(error).__name__


loops: Registry[type[Loop]] = Registry("agent loop", "loopwright.loops", Loop, "AgentLoop")
loops.add("single_turn", SingleTurn)
loops.add_lazily("tools", "loopwright.rollouts.loops.tools:ToolLoop")
loops.add_lazily("remote", "loopwright.rollouts.remote.config:RemoteLoop")

AnyLoop = Annotated[SerializeAsAny[LoopConfig], BeforeValidator(config_parser(loops))]
"""A config field for a loop of any type."""


def agent_loop(config: LoopConfig, scenario_dir: Path) -> AgentLoop:
    """The agent loop of a config; TypeError if it works through a gateway instead of a session."""
    loop = loops.get(config.type)(config, scenario_dir)
    if not isinstance(loop, AgentLoop):
        raise TypeError(f"agent loop {config.type!r} works through a gateway; it cannot drive a session")
    return loop
