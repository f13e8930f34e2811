"""The guard: timeout, retries, limit of concurrency, circuit breaker and checks, once for all judgers.

Whatever goes wrong inside comes out as JudgeFailed with its cause, never as a number. All time is the event loop's, so
that a loop with a simulated clock runs this very code.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any, TypeVar

from loopwright.core.reward import Reward
from loopwright.rollouts.judgers.base import LONGEST_PAUSE_S, JudgeFailed, Judger, JudgerConfig, Payload, Verdict
from loopwright.rollouts.judgers.batch import Batches, one_each, or_failed
from loopwright.rollouts.judgers.breaker import Breaker
from loopwright.rollouts.judgers.verdict_parsing import BadVerdict, BadVerdictType, as_reward, weighted

T = TypeVar("T")


class JudgerDown(JudgeFailed):
    """The circuit breaker is open: nothing was asked. `retry_in_s` later it may be worth it."""

    def __init__(self, message: str, retry_in_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_in_s = retry_in_s


class Guard:
    """Makes tries at something until one succeeds, within the limits of a judger's config."""

    def __init__(self, config: JudgerConfig, rng: Random | None = None) -> None:
        self._config, self._name = config, config.label()
        self._rng = rng or Random(f"0:judger:{self._name}")
        self._room = asyncio.Semaphore(config.concurrency)
        self._breaker = Breaker(config.breaker, config.cooldown_s)

    async def run(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """What the first good attempt gives; JudgeFailed if there is none."""
        tries = self._config.retries + 1
        for number in range(tries):
            if number:
                await asyncio.sleep(self._pause_s(number - 1))
            try:
                return await self._try(attempt)
            except (BadVerdict, BadVerdictType, JudgerDown):
                raise
            except Exception as error:
                if number + 1 == tries:
                    after = f" in {tries} tries" if tries > 1 else ""
                    raise JudgeFailed(f"judger {self._name!r} gave no verdict{after}: {_describe(error)}") from error
        raise JudgeFailed(f"judger {self._name!r} was never asked")  # for the type checker; there is always one try

    async def _try(self, attempt: Callable[[], Awaitable[T]]) -> T:
        async with self._room:
            loop = asyncio.get_running_loop()
            if (wait_s := self._breaker.wait_s(loop.time())) > 0:
                # In the same words each time, so that a report counts an outage as one.
                raise JudgerDown(
                    f"judger {self._name!r} is down after {self._config.breaker} in a row without a verdict, "
                    f"the last because of {self._breaker.last}",
                    wait_s,
                )
            probe = self._breaker.enter()
            limit_s = self._config.limit_s()
            try:
                async with asyncio.timeout(limit_s) as scope:
                    value = await attempt()
            except (BadVerdict, BadVerdictType, asyncio.CancelledError):
                self._breaker.left(probe=probe)
                raise
            except Exception as error:
                late = isinstance(error, TimeoutError) and scope.expired()
                failure = TimeoutError(f"it took longer than {limit_s:g} s") if late else error
                self._breaker.failed(loop.time(), _describe(failure), probe=probe)
                if late:
                    raise failure from error
                raise
            except BaseException:
                self._breaker.left(probe=probe)
                raise
            self._breaker.succeeded()
            return value

    def _pause_s(self, number: int) -> float:
        return min(self._config.pause_s * 2.0**number, LONGEST_PAUSE_S) * (0.5 + self._rng.random())


class Guarded(Judger):
    """A judger behind its guard: what it gives is a finite, weighted reward under its name, or JudgeFailed."""

    def __init__(self, judger: Judger, rng: Random | None = None) -> None:
        config: JudgerConfig = judger.config
        super().__init__(config, judger.home)
        self.needs, self.compares = judger.needs, judger.compares
        self._judger, self._name = judger, config.label()
        self._guard = Guard(config, rng)
        self._batches = Batches(self._together, judger.batch, judger.batch_wait_s) if judger.batch > 1 else None

    async def judge(self, payload: Payload) -> Reward:
        """The verdict on one episode; see `Judger.judge`."""
        if self._batches is not None:
            return await self._batches.judge(payload)
        return await self._run(lambda: self._one(payload))

    async def judge_group(self, payloads: Sequence[Payload]) -> list[Verdict]:
        """The verdicts on a group; those that could not be given are JudgeFailed values."""
        return await self._run(lambda: self._group(payloads))

    async def close(self) -> None:
        if self._batches is not None:
            await self._batches.close()
        await self._judger.close()

    async def _together(self, payloads: Sequence[Payload]) -> list[Verdict]:
        """The verdicts on a batch. One that is no verdict costs no other its reward."""
        return await self._run(lambda: self._batch(payloads))

    async def _run(self, attempt: Callable[[], Awaitable[T]]) -> T:
        if not self._judger.delegates:
            return await self._guard.run(attempt)
        try:
            return await attempt()
        except JudgeFailed:
            raise
        except Exception as error:
            raise JudgeFailed(f"judger {self._name!r} gave no verdict: {_describe(error)}") from error

    async def _one(self, payload: Payload) -> Reward:
        return self._checked(await self._judger.judge(payload))

    async def _batch(self, payloads: Sequence[Payload]) -> list[Verdict]:
        found = one_each(await self._judger.judge_batch(payloads), self._name, len(payloads))
        return [v if isinstance(v, JudgeFailed) else or_failed(self._checked, v) for v in found]

    async def _group(self, payloads: Sequence[Payload]) -> list[Verdict]:
        found = one_each(await self._judger.judge_group(payloads), self._name, len(payloads))
        return [verdict if isinstance(verdict, JudgeFailed) else self._checked(verdict) for verdict in found]

    def _checked(self, value: Any) -> Reward:
        return weighted(as_reward(value, self._name), self.config.weight, self._name)


async def judge_all(judger: Judger, payloads: Sequence[Payload]) -> list[Verdict]:
    """A verdict on each, compared with one another if the judger does that. A failed one costs no other its reward."""
    if judger.compares:
        try:
            return list(await judger.judge_group(payloads))
        except JudgeFailed as error:
            return [error] * len(payloads)
    found = await asyncio.gather(*map(judger.judge, payloads), return_exceptions=True)
    for verdict in found:
        if isinstance(verdict, BaseException) and not isinstance(verdict, JudgeFailed):
            raise verdict
    return [verdict for verdict in found if isinstance(verdict, Reward | JudgeFailed)]


def _describe(error: BaseException) -> str:
    text = str(error)
    return text if isinstance(error, JudgeFailed) and text else f"{type(error).__name__}: {text}".rstrip(": ")
