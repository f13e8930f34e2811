"""The pool of `workers = 0`: one worker, in this process and event loop."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from loopwright.rollouts.pools.base import Pool, Worker, WorkerFactory, WorkerLost, answered, timeout_error


class LocalPool(Pool):
    """One worker in this process. Its code is not copied, and cannot be killed: only cancelled, and then left alone."""

    def __init__(self, build: WorkerFactory, *, name: str = "loop", grace_s: float = 5.0) -> None:
        self._build, self._name, self._grace_s = build, name, grace_s
        self._worker: Worker | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        if self._worker is None:
            self._worker = self._build()

    async def call(self, request: Any, *, timeout_s: float | None = None) -> Any:
        return await self._answer(self._open().handle(request), timeout_s)

    async def publish(self, update: Any, *, timeout_s: float | None = None) -> list[Any]:
        return [await self._answer(self._open().apply_update(update), timeout_s)]

    @property
    def description(self) -> Any:
        return self._open().describe()

    @property
    def in_flight(self) -> int:
        return len(self._calls)

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=self._grace_s)
        await worker.close()

    def _open(self) -> Worker:
        if self._worker is None:
            raise RuntimeError(f"pool {self._name!r} is not open: await its start() first")
        return self._worker

    async def _answer(self, work: Coroutine[Any, Any, Any], timeout_s: float | None) -> Any:
        loop = asyncio.get_running_loop()
        call = loop.create_task(answered(work))
        self._calls.add(call)
        # What asyncio.wait does, at half its price: this is once or twice in every rollout.
        news: asyncio.Future[None] = loop.create_future()
        call.add_done_callback(lambda _: _tell(news))
        timer = None if timeout_s is None else loop.call_later(timeout_s, _tell, news)
        try:
            await news
            if not call.done():
                await self._ended(call)
                raise timeout_error(timeout_s)
            if call.cancelled():
                raise WorkerLost(f"pool {self._name!r} was closed with this call in it")
            return call.result()
        except asyncio.CancelledError:
            if not call.done():
                await self._ended(call)
            raise
        finally:
            self._calls.discard(call)
            if timer is not None:
                timer.cancel()

    async def _ended(self, call: asyncio.Task[Any]) -> None:
        """Cancel a call and give it time to clean up; what does not heed this goes on without us."""
        call.cancel()
        await asyncio.wait((call,), timeout=self._grace_s)
        if call.done() and not call.cancelled():
            call.exception()  # Seen, and of no interest: the call is over for its caller.


def _tell(news: "asyncio.Future[None]") -> None:
    if not news.done():
        news.set_result(None)
