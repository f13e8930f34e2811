"""The loop worker: an agent loop with its engine. Failures of a rollout are recorded in its episode."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loopwright.core.config import overridden
from loopwright.core.episode import Episode
from loopwright.core.outcome import OUT_OF_TIME, Fault, Outcome
from loopwright.core.task import Task
from loopwright.engines.base import ContextFull, Engine, EngineConfig, EngineError, Sampling, engines
from loopwright.engines.weight_update import WeightUpdate as WeightUpdate
from loopwright.engines.weight_update import apply_update
from loopwright.gateway.sessions.session import BudgetSpent, Session
from loopwright.rollouts.loops.base import AgentLoop, LoopConfig, agent_loop, describe_error
from loopwright.rollouts.pools.base import EventLoopBlocked, Worker, contain_failures
from loopwright.rollouts.pools.steps import BLOCKED_S, WatchedCall, current_call

_GRACE_S = 5.0
"""How long a loop may continue after its cancellation."""
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
    loop: str = ""
    """The name of its loop, among the loops of a run; empty for the run's own."""

    def merge_sampling(self, default: Sampling) -> Sampling:
        """The loop's sampling, overridden by what the request sets."""
        return overridden(default, self.sampling)


class LoopWorker(Worker):
    """Runs a rollout and returns its episode; exceptions of the loop become failed episodes.

    It may have several loops by name, for different sources of tasks, over one engine.
    """

    def __init__(self, loop: AgentLoop | Mapping[str, AgentLoop], engine: Engine) -> None:
        self._loops = loop if isinstance(loop, Mapping) else {"": loop}
        self._engine = engine

    @classmethod
    def build(
        cls, loop: LoopConfig | Mapping[str, LoopConfig], engine: EngineConfig, scenario_dir: Path
    ) -> "LoopWorker":
        """Build the loops and the engine from their configs, in the process where they run."""
        configs = loop if isinstance(loop, Mapping) else {"": loop}
        loops = {name: agent_loop(config, scenario_dir) for name, config in configs.items()}
        return cls(loops, engines.get(engine.type)(engine, scenario_dir))

    async def handle(self, request: RolloutRequest) -> Episode:
        loop = self._loops[request.loop]
        config, call = loop.config, current_call.get() or WatchedCall()
        engine, sampling = self._engine.for_session(request.seed), request.merge_sampling(config.sampling)
        session = Session(engine, sampling, seed=request.seed, limits=config.limits())
        deadline = PolicyDeadline(session, config, call, f"{type(loop).__name__}.run")
        call.on_stall.append(deadline.postpone)
        call.limit_s = config.deadline_s
        try:
            async with deadline:
                # A copy, so that what the loop does to its task does not reach the judger.
                answer = await contain_failures(loop.run(deepcopy(request.task), session))
            episode = _checked(answer, loop)
        except Exception as error:  # noqa: BLE001  a user's loop may raise anything
            if isinstance(error, EventLoopBlocked) and call.is_stubborn:
                return session.episode(
                    request.task, Outcome.TIMEOUT, fault=Fault.WORKLOAD, reason=deadline.describe_stubborn()
                )
            if isinstance(error, EventLoopBlocked):
                return _blocked(request.task, session, call, loop)
            if isinstance(error, TimeoutError) and deadline.expired_at is not None:
                if call.blocked_s_until_now() >= config.deadline_s / 2:
                    return _blocked(request.task, session, call, loop)
                return _timed_out(session, request.task, deadline, config.deadline_s)
            for cause in _causes(error):
                if isinstance(cause, BudgetSpent | ContextFull):
                    return session.episode(request.task, Outcome.TRUNCATED, reason=str(cause))
                if isinstance(cause, EngineError):
                    return session.episode(request.task, Outcome.LOST, reason=str(cause))
            return session.episode(request.task, Outcome.CRASHED, reason=describe_error(error))
        finally:
            call.on_stall.remove(deadline.postpone)
        if deadline.is_over and call.blocked_s_until_now() >= BLOCKED_S:
            return _blocked(request.task, session, call, loop)
        return episode

    def describe_calls(self) -> str:
        return " or ".join(dict.fromkeys(f"{type(loop).__name__}.run" for loop in self._loops.values()))

    async def apply_update(self, update: WeightUpdate) -> int:
        return await apply_update(self._engine, update)

    async def close(self) -> None:
        async with AsyncExitStack() as closing:
            closing.push_async_callback(self._engine.close)
            for loop in self._loops.values():
                closing.push_async_callback(loop.close)


def _checked(answer: object, loop: AgentLoop) -> Episode:
    """What the loop returned, without a reward."""
    if not isinstance(answer, Episode):
        raise TypeError(f"{type(loop).__name__}.run returned a {type(answer).__name__} instead of an Episode")
    if answer.reward is not None:  # only judgers give rewards: a loop's own must not survive a fault
        return replace(answer, reward=None, trainable=False, in_baseline=False)
    return answer


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


class PolicyDeadline:
    """A timeout whose clock stands still while the rollout only waits for its engine.

    The engine has its own limits: `engine_timeout_s` without a token, and ten times as much in all.
    """

    def __init__(self, session: Session, config: LoopConfig, call: WatchedCall, name: str) -> None:
        self._session, self._config, self._call, self._name = session, config, call, name
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._start = self._loop.time()
        self._stalled_s = 0.0
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self.expired_at: float | None = None
        """When it expired, on the event loop's clock."""
        self.engine_failure = ""
        """What the engine did not do in time, if it waited for the engine when it expired."""

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._session.engine_wait.on_change = self._arm
        self._arm()

    async def __aexit__(self, *error: Any) -> None:
        self._session.engine_wait.on_change = None
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(*error)

    def postpone(self, stall_s: float) -> None:
        """Another rollout has blocked the event loop for this long."""
        self._stalled_s += stall_s
        if self._timer is not None:
            self._arm()

    @property
    def is_over(self) -> bool:
        """Whether it has passed, even if the event loop was blocked and nothing was cancelled."""
        return self._due() < self._loop.time()

    def _arm(self) -> None:
        if self.expired_at is not None:  # code that ignores its cancellation may wait for the engine once more
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._due(), self._check)

    def _due(self) -> float:
        """When it expires, unless the engine samples a token before that."""
        session, config, now = self._session, self._config, self._loop.time()
        waited_s = session.engine_wait.total_s(now)
        if session.engine_wait.since is None:
            return self._start + config.deadline_s + waited_s + self._stalled_s
        left_s = min(config.silence_s - session.silent_s(now), config.engine_s - waited_s)
        return now + left_s + self._stalled_s

    def _check(self) -> None:
        session, now = self._session, self._loop.time()
        if self._due() > now + _TOLERANCE_S:  # tokens have arrived since
            self._arm()
            return
        if session.engine_wait.since is not None:
            offset_s = _TOLERANCE_S - self._stalled_s
            silent_s, waited_s = session.silent_s(now), session.engine_wait.total_s(now)
            self.engine_failure = self._config.engine_failure(silent_s + offset_s, waited_s + offset_s)
        self.expired_at = now
        self._timeout.reschedule(now)
        self._timer = self._loop.call_later(_GRACE_S, self._insist)

    def describe_stubborn(self) -> str:
        """Why the episode has ended if its code has ignored its cancellation."""
        return f"{OUT_OF_TIME} {self._config.deadline_s:g} s; {self._name} ignored its cancellation for {_GRACE_S:g} s"

    def _insist(self) -> None:
        """Interrupt code that has ignored its cancellation, and give it up if it ignores that, too."""
        if self._call.is_stubborn:
            self._call.give_up(self.describe_stubborn())
            return
        self._call.is_stubborn = True
        if self._task is not None:
            self._task.cancel()
        self._timer = self._loop.call_later(_GRACE_S, self._insist)


def _blocked(task: Task, session: Session, call: WatchedCall, loop: AgentLoop) -> Episode:
    reason = call.describe_blocking(f"{type(loop).__name__}.run", loop.config.deadline_s)
    return session.episode(task, Outcome.TIMEOUT, fault=Fault.WORKLOAD, reason=reason)


def _timed_out(session: Session, task: Task, deadline: PolicyDeadline, deadline_s: float) -> Episode:
    """The episode of a rollout that missed its deadline through the policy or its tools, the engine, or the loop."""
    reason = f"{OUT_OF_TIME} {deadline_s:g} s"
    phase, _, end = session.interrupted or ("", 0.0, 0.0)
    if not phase or end < (deadline.expired_at or 0.0) - _TOLERANCE_S:
        return session.episode(task, Outcome.TIMEOUT, fault=Fault.WORKLOAD, reason=f"{reason}; the loop hangs")
    if deadline.engine_failure:
        return session.episode(task, Outcome.LOST, reason=deadline.engine_failure)
    return session.episode(task, Outcome.TRUNCATED, reason=f"{reason}; it waited for {phase}")
