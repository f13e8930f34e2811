"""The loop worker: an agent loop with its engine. Whatever goes wrong in a rollout becomes part of its episode."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loopwright.core.episode import Episode
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.task import Task
from loopwright.engines.base import ContextFull, Engine, EngineConfig, EngineError, Sampling, engines
from loopwright.engines.weight_update import WeightUpdate as WeightUpdate
from loopwright.engines.weight_update import apply_update
from loopwright.gateway.sessions.session import BudgetSpent, Session
from loopwright.rollouts.loops.base import AgentLoop, LoopConfig, agent_loop, describe_error
from loopwright.rollouts.pools.base import Worker, contain_failures

STALLED_S = 30.0
"""An engine that gave no token for so long, or for half of a shorter deadline, has stalled."""
_TOLERANCE_S = 0.001
"""Event loops let timers go off a little early."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One rollout to be made. The same seed gives the same samples."""

    task: Task
    seed: str
    sampling: Sampling | None = None
    trial: int | None = None
    """The trial that it is an attempt at."""

    def over(self, sampling: Sampling) -> Sampling:
        """How it is sampled: what it says of its own, and for the rest as its loop does."""
        own = self.sampling
        return sampling if own is None else sampling.model_copy(update=own.model_dump(include=own.model_fields_set))


class LoopWorker(Worker):
    """Answers a request with an episode, and never with an exception of the loop's."""

    def __init__(self, loop: AgentLoop, engine: Engine) -> None:
        self._loop, self._engine = loop, engine

    @classmethod
    def build(cls, loop: LoopConfig, engine: EngineConfig, home: Path) -> "LoopWorker":
        """Make both from their configuration, where the worker lives."""
        return cls(agent_loop(loop, home), engines.get(engine.type)(engine, home))

    async def handle(self, request: RolloutRequest) -> Episode:
        config = self._loop.config
        engine, sampling = self._engine.for_session(request.seed), request.over(config.sampling)
        session = Session(engine, sampling, seed=request.seed, limits=config.limits())
        deadline = asyncio.timeout(config.deadline_s)
        try:
            async with deadline:
                episode: Any = await contain_failures(self._loop.run(request.task, session))
            if not isinstance(episode, Episode):
                kind = type(episode).__name__
                raise TypeError(f"{type(self._loop).__name__}.run gave a {kind} instead of an Episode")
            if episode.reward is not None:  # the judger's to give: a loop's own must not outlive a fault
                return replace(episode, reward=None, trainable=False, in_baseline=False)
            return episode
        except Exception as error:  # noqa: BLE001  a loop of the user's own may raise anything
            if isinstance(error, TimeoutError) and deadline.expired():
                return _late(session, request.task, config.deadline_s, deadline.when() or 0.0)
            for cause in _causes(error):
                if isinstance(cause, BudgetSpent | ContextFull):
                    return session.episode(request.task, Outcome.TRUNCATED, reason=str(cause))
                if isinstance(cause, EngineError):
                    return session.episode(request.task, Outcome.LOST, reason=str(cause))
            return session.episode(request.task, Outcome.CRASHED, reason=describe_error(error))

    async def apply_update(self, update: WeightUpdate) -> int:
        return await apply_update(self._engine, update)

    async def close(self) -> None:
        try:
            await self._loop.close()
        finally:
            await self._engine.close()


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that it was raised from, which may be itself; of a group, all of them."""
    seen, waiting = set[int](), [error]
    while waiting:
        if id(cause := waiting.pop()) in seen:
            continue
        seen.add(id(cause))
        yield cause
        inner = cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
        waiting += [each for each in (cause.__cause__, *reversed(inner)) if each is not None]


def _late(session: Session, task: Task, deadline_s: float, at: float) -> Episode:
    """Whose fault a deadline is: a policy's that was still talking or had tools at work, an engine's, or the loop's."""
    reason = f"not done within {deadline_s:g} s"
    name, begun, ended = session.interrupted or ("", 0.0, 0.0)
    if not name or ended < at - _TOLERANCE_S:
        return session.episode(task, Outcome.TIMEOUT, fault=Fault.WORKLOAD, reason=f"{reason}; the loop hangs")
    if name != "generate":
        return session.episode(task, Outcome.TRUNCATED, reason=f"{reason}; it waited for {name}")
    last = session.last_token_at
    if last is None or ended - max(last, begun) >= min(STALLED_S, deadline_s / 2):
        return session.episode(task, Outcome.LOST, reason=f"{reason}; the engine gave no token")
    return session.episode(task, Outcome.TRUNCATED, reason=f"{reason}; the policy was still talking")
