"""The loop worker: an agent loop with its engine. Failures of a rollout are recorded in its episode."""

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
"""An engine that samples no token for this long, or for half of a shorter deadline, has stalled."""
_TOLERANCE_S = 0.001
"""Timers of event loops may fire slightly early."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A request for one rollout. The same seed gives the same samples."""

    task: Task
    seed: str
    sampling: Sampling | None = None
    trial: int | None = None
    """The number of the trial that it is an attempt of."""

    def merge_sampling(self, default: Sampling) -> Sampling:
        """The loop's sampling, overridden by what the request sets."""
        own = self.sampling
        return default if own is None else default.model_copy(update=own.model_dump(include=own.model_fields_set))


class LoopWorker(Worker):
    """Runs a rollout and returns its episode; exceptions of the loop become failed episodes."""

    def __init__(self, loop: AgentLoop, engine: Engine) -> None:
        self._loop, self._engine = loop, engine

    @classmethod
    def build(cls, loop: LoopConfig, engine: EngineConfig, scenario_dir: Path) -> "LoopWorker":
        """Build the loop and the engine from their configs, in the process where they run."""
        return cls(agent_loop(loop, scenario_dir), engines.get(engine.type)(engine, scenario_dir))

    async def handle(self, request: RolloutRequest) -> Episode:
        config = self._loop.config
        engine, sampling = self._engine.for_session(request.seed), request.merge_sampling(config.sampling)
        session = Session(engine, sampling, seed=request.seed, limits=config.limits())
        deadline = asyncio.timeout(config.deadline_s)
        try:
            async with deadline:
                episode: Any = await contain_failures(self._loop.run(request.task, session))
            if not isinstance(episode, Episode):
                kind = type(episode).__name__
                raise TypeError(f"{type(self._loop).__name__}.run returned a {kind} instead of an Episode")
            if episode.reward is not None:  # only judgers give rewards: a loop's own must not survive a fault
                return replace(episode, reward=None, trainable=False, in_baseline=False)
            return episode
        except Exception as error:  # noqa: BLE001  a user's loop may raise anything
            if isinstance(error, TimeoutError) and deadline.expired():
                return _timed_out(session, request.task, config.deadline_s, deadline.when() or 0.0)
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
    """An exception and its causes, including those inside exception groups; chains may be circular."""
    visited, pending = set[int](), [error]
    while pending:
        if id(cause := pending.pop()) in visited:
            continue
        visited.add(id(cause))
        yield cause
        inner = cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
        pending += [each for each in (cause.__cause__, *reversed(inner)) if each is not None]


def _timed_out(session: Session, task: Task, deadline_s: float, deadline: float) -> Episode:
    """The episode of a rollout that missed its deadline through the policy or its tools, the engine, or the loop."""
    reason = f"not finished within {deadline_s:g} s"
    phase, start, end = session.interrupted or ("", 0.0, 0.0)
    if not phase or end < deadline - _TOLERANCE_S:
        return session.episode(task, Outcome.TIMEOUT, fault=Fault.WORKLOAD, reason=f"{reason}; the loop hangs")
    if phase != "generate":
        return session.episode(task, Outcome.TRUNCATED, reason=f"{reason}; it waited for {phase}")
    last = session.last_token_at
    if last is None or end - max(last, start) >= min(STALLED_S, deadline_s / 2):
        return session.episode(task, Outcome.LOST, reason=f"{reason}; the engine sampled no token")
    return session.episode(task, Outcome.TRUNCATED, reason=f"{reason}; the policy was still sampling")
