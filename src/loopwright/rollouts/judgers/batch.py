"""Batching: payloads that arrive together are judged together, and each caller gets its own verdict."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from loopwright.core.trial import Reward
from loopwright.rollouts.judgers.base import JudgeFailed, Payload, Verdict

_Waiter = asyncio.Future[Reward]


class _Batch:
    """Payloads by the future on which the caller awaits the verdict."""

    def __init__(self) -> None:
        self.payloads: dict[_Waiter, Payload] = {}
        self.timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None

    def remove(self, waiter: _Waiter) -> None:
        """Drop a caller that was cancelled; when none is left, the batch is cancelled."""
        self.payloads.pop(waiter, None)
        if not self.payloads and self.task is not None:
            self.task.cancel()


class Batches:
    """Collects payloads until there are `size` of them, or `wait_s` after the first, and judges them in one call."""

    def __init__(
        self, judge: Callable[[Sequence[Payload]], Awaitable[Sequence[Verdict]]], size: int, wait_s: float
    ) -> None:
        self._judge, self._size, self._wait_s = judge, size, wait_s
        self._open: _Batch | None = None
        self._running: set[_Batch] = set()

    async def judge(self, payload: Payload) -> Reward:
        """The reward for one payload. If its batch fails, each payload of it fails."""
        loop = asyncio.get_running_loop()
        waiter: _Waiter = loop.create_future()
        batch = self._open or _Batch()
        batch.payloads[waiter] = payload
        if len(batch.payloads) >= self._size:
            self._start(batch)
        elif self._open is None:
            batch.timer = loop.call_later(self._wait_s, self._start, batch)
            self._open = batch
        try:
            return await waiter
        except asyncio.CancelledError:
            batch.remove(waiter)
            raise

    async def close(self) -> None:
        """Fail everything that is waited for."""
        batches = [*self._running, *([self._open] if self._open else [])]
        self._open = None
        for batch in batches:
            if batch.timer is not None:
                batch.timer.cancel()
            _settle(batch.payloads, JudgeFailed("the judger was closed"))
            if batch.task is not None:
                batch.task.cancel()
        if tasks := [batch.task for batch in batches if batch.task is not None]:
            await asyncio.wait(tasks)

    def _start(self, batch: _Batch) -> None:
        if self._open is batch:
            self._open = None
        if batch.timer is not None:
            batch.timer.cancel()
        if batch.payloads:
            self._running.add(batch)
            batch.task = asyncio.create_task(self._run(batch))
            batch.task.add_done_callback(lambda _: self._running.discard(batch))

    async def _run(self, batch: _Batch) -> None:
        waiters, payloads = list(batch.payloads), list(batch.payloads.values())
        try:
            for waiter, verdict in zip(waiters, await self._judge(payloads), strict=True):
                _settle((waiter,), verdict)
        except Exception as error:  # noqa: BLE001  raised to the callers
            _settle(waiters, error)


def _settle(waiters: Iterable[_Waiter], verdict: Reward | Exception) -> None:
    for waiter in waiters:
        if waiter.done():
            continue
        if isinstance(verdict, Exception):
            waiter.set_exception(verdict)
        else:
            waiter.set_result(verdict)
