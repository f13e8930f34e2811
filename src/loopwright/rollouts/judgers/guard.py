"""The guard: timeout, retries, concurrency limit, circuit breaker and checks, once for all judgers.

Every failure inside comes out as JudgeFailed with its cause, never as a number. All times are the event loop's, so
that the same code runs in simulated time.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from loopwright.core.trial import Reward
from loopwright.rollouts.judgers.base import (
    MAX_PAUSE_S,
    BaseJudger,
    BatchJudger,
    GroupJudger,
    JudgeFailed,
    Judger,
    JudgerConfig,
    Payload,
    Verdict,
    judgers,
)
from loopwright.rollouts.judgers.batch import Batches
from loopwright.rollouts.judgers.verdict_parsing import (
    BadVerdict,
    BadVerdictType,
    apply_weight,
    as_reward,
    check_entries,
    or_failure,
)
from loopwright.rollouts.pools.base import EventLoopBlocked, contain_failures

T = TypeVar("T")


class JudgerDown(JudgeFailed):
    """The circuit breaker is open, so the judger was not called. Try again after `retry_in_s`."""

    def __init__(self, message: str, retry_in_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_in_s = retry_in_s


class Breaker:
    """Opens after `failures` in a row. After `cooldown_s` it admits one probe, which closes it or opens it again.

    The caller passes the time, so that it works with any clock.
    """

    def __init__(self, failures: int, cooldown_s: float) -> None:
        self._max_failures, self._cooldown_s = failures, cooldown_s
        self._failures = 0
        self.last_failure = ""
        """The reason of the last failure."""
        self._open_until_s: float | None = None
        self._probing = False

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next attempt is allowed: 0 while it is closed or a probe is due."""
        if self._open_until_s is None:
            return 0.0
        if self._probing:
            return self._cooldown_s
        return max(0.0, self._open_until_s - now_s)

    def start(self) -> bool:
        """Start an attempt that `wait_s` allowed; returns whether it is the probe."""
        self._probing = self._open_until_s is not None
        return self._probing

    def succeed(self) -> None:
        """A verdict arrived: close."""
        self._failures, self._open_until_s, self._probing = 0, None, False

    def fail(self, now_s: float, reason: str, *, probe: bool) -> None:
        """An attempt failed. Attempts that were running when the breaker opened do not extend the cool-down."""
        self._failures, self.last_failure = self._failures + 1, reason
        if probe:
            self._probing = False
        if probe or (self._open_until_s is None and 0 < self._max_failures <= self._failures):
            self._open_until_s = now_s + self._cooldown_s

    def abandon(self, *, probe: bool) -> None:
        """An attempt was cancelled by its caller, which says nothing about the judger."""
        if probe:
            self._probing = False


class Guard:
    """Attempts something until it succeeds, within the limits of a judger's config."""

    def __init__(self, config: JudgerConfig, rng: Random | None = None) -> None:
        self._config, self._name = config, config.label()
        self._rng = rng or Random(f"0:judger:{self._name}")
        self._slots = asyncio.Semaphore(config.concurrency)
        self._breaker = Breaker(config.breaker, config.cooldown_s)

    async def run(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of the first successful attempt; JudgeFailed if all of them fail."""
        attempts = self._config.retries + 1
        for number in range(attempts):
            if number:
                pause_s = min(self._config.pause_s * 2.0 ** (number - 1), MAX_PAUSE_S)
                await asyncio.sleep(pause_s * (0.5 + self._rng.random()))
            try:
                return await self._attempt(attempt)
            except (BadVerdict, BadVerdictType, JudgerDown):
                raise
            except Exception as error:
                # Code that blocks the event loop delays all others: it is not tried again.
                if number + 1 == attempts or isinstance(error, EventLoopBlocked):
                    after = f" in {number + 1} tries" if number else ""
                    raise JudgeFailed(f"judger {self._name!r} gave no verdict{after}: {_describe(error)}") from error
        raise JudgeFailed(f"judger {self._name!r} was never called")  # for the type checker: there is always a try

    async def _attempt(self, attempt: Callable[[], Awaitable[T]]) -> T:
        async with self._slots:
            loop = asyncio.get_running_loop()
            if (wait_s := self._breaker.wait_s(loop.time())) > 0:
                # Always the same text, so that a report counts one outage once.
                raise JudgerDown(
                    f"judger {self._name!r} is down after {self._config.breaker} consecutive failures, "
                    f"the last: {self._breaker.last_failure}",
                    wait_s,
                )
            probe = self._breaker.start()
            timeout_s = self._config.attempt_timeout_s()
            try:
                async with asyncio.timeout(timeout_s) as scope:
                    value: T = await contain_failures(attempt())
            except (BadVerdict, BadVerdictType):
                self._breaker.abandon(probe=probe)
                raise
            except Exception as error:
                timed_out = isinstance(error, TimeoutError) and scope.expired()
                failure = TimeoutError(f"it took longer than {timeout_s:g} s") if timed_out else error
                self._breaker.fail(loop.time(), _describe(failure), probe=probe)
                if timed_out:
                    raise failure from error
                raise
            except BaseException:
                self._breaker.abandon(probe=probe)
                raise
            self._breaker.succeed()
            return value


class ErrorWrapper:
    """Stands in for the guard of a judger that combines others, which have their own guards."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def run(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of the attempt; any exception becomes JudgeFailed."""
        try:
            return await attempt()
        except JudgeFailed:
            raise
        except Exception as error:
            raise JudgeFailed(f"judger {self._name!r} gave no verdict: {_describe(error)}") from error


class GuardedJudger(ABC):
    """A judger behind its guard. Its verdicts are finite, weighted rewards under its name, or JudgeFailed."""

    compares = False
    """Whether it must be given whole groups."""

    def __init__(self, judger: BaseJudger, rng: Random | None = None) -> None:
        self.config: JudgerConfig = judger.config
        self.needs = judger.needs
        self._name, self._close = self.config.label(), judger.close
        self._guard = ErrorWrapper(self._name) if judger.combines else Guard(self.config, rng)

    @abstractmethod
    async def judge_group(self, payloads: Sequence[Payload]) -> list[Verdict]:
        """A verdict for each payload, in order."""

    async def judge(self, payload: Payload) -> Reward:
        """The reward of one episode; JudgeFailed without one."""
        if self.compares:
            raise JudgeFailed(f"judger {self._name!r} compares a group; it cannot judge one episode alone")
        (verdict,) = await self.judge_group([payload])
        if isinstance(verdict, JudgeFailed):
            raise verdict
        return verdict

    async def close(self) -> None:
        """Release all resources."""
        await self._close()

    def _check(self, value: Any) -> Reward:
        return apply_weight(as_reward(value, self._name), self.config.weight, self._name)


class _OneByOne(GuardedJudger):
    """Each payload in its own attempt, all at the same time."""

    def __init__(self, judger: Judger, rng: Random | None = None) -> None:
        super().__init__(judger, rng)
        self._judger = judger

    async def judge_group(self, payloads: Sequence[Payload]) -> list[Verdict]:
        if len(payloads) == 1:  # the usual case needs no task
            return [await self._verdict(payloads[0])]
        return list(await asyncio.gather(*map(self._verdict, payloads)))

    async def _verdict(self, payload: Payload) -> Verdict:
        async def attempt() -> Reward:
            return self._check(await self._judger.judge(payload.copy()))

        try:
            return await self._guard.run(attempt)
        except JudgeFailed as error:
            return error


class _InBatches(GuardedJudger):
    """Payloads that arrive together share an attempt. A bad entry does not cost the others their rewards."""

    def __init__(self, judger: BatchJudger, rng: Random | None = None) -> None:
        super().__init__(judger, rng)
        self._judger = judger
        self._batches = Batches(self._judge_batch, judger.config.batch, judger.config.batch_wait_s)

    async def judge_group(self, payloads: Sequence[Payload]) -> list[Verdict]:
        return list(await asyncio.gather(*map(self._verdict, payloads)))

    async def _verdict(self, payload: Payload) -> Verdict:
        try:
            return await self._batches.judge(payload)
        except JudgeFailed as error:
            return error

    async def _judge_batch(self, payloads: Sequence[Payload]) -> list[Verdict]:
        async def attempt() -> list[Verdict]:
            copies = [payload.copy() for payload in payloads]
            entries = check_entries(await self._judger.judge_batch(copies), self._name, len(payloads))
            return [e if isinstance(e, JudgeFailed) else or_failure(self._check, e) for e in entries]

        return await self._guard.run(attempt)

    async def close(self) -> None:
        await self._batches.close()
        await super().close()


class _WholeGroups(GuardedJudger):
    """All payloads of a group in one attempt."""

    def __init__(self, judger: GroupJudger, rng: Random | None = None) -> None:
        super().__init__(judger, rng)
        self._judger, self.compares = judger, judger.compares

    async def judge_group(self, payloads: Sequence[Payload]) -> list[Verdict]:
        async def attempt() -> list[Verdict]:
            copies = [payload.copy() for payload in payloads]
            entries = check_entries(await self._judger.judge_group(copies), self._name, len(payloads))
            return [e if isinstance(e, JudgeFailed) else self._check(e) for e in entries]

        try:
            return await self._guard.run(attempt)
        except JudgeFailed as error:
            return [error] * len(payloads)


def guard_judger(judger: BaseJudger, rng: Random | None = None) -> GuardedJudger:
    """Put a judger behind a guard; `rng` spreads its retries."""
    match judger:
        case Judger():
            return _OneByOne(judger, rng)
        case BatchJudger():
            return _InBatches(judger, rng)
        case GroupJudger():
            return _WholeGroups(judger, rng)
    raise TypeError(f"{type(judger).__name__} must be a subclass of Judger, BatchJudger or GroupJudger")


BuildPart = Callable[[JudgerConfig, Path], GuardedJudger]
"""Builds a judger that another one consists of."""


def build_judger(
    config: JudgerConfig, scenario_dir: Path, rng: Random | None = None, *, build_part: BuildPart | None = None
) -> GuardedJudger:
    """The judger of a config, behind its guard. `build_part` builds those that it consists of, if it combines any."""
    judger_class: Any = judgers.get(config.type)
    parts = {} if build_part is None else {"build_part": build_part}
    return guard_judger(judger_class.build(config, scenario_dir, **parts), rng)


def _describe(error: BaseException) -> str:
    text = str(error)
    return text if isinstance(error, JudgeFailed) and text else f"{type(error).__name__}: {text}".rstrip(": ")
