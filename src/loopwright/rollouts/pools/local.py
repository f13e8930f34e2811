"""The pool of `workers = 0`: one worker, in this process and event loop."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from loopwright.rollouts.pools.base import Pool, Worker, WorkerFactory, WorkerLost, contain_failures, timeout_error


class LocalPool(Pool):
    """One worker in this process. Nothing is copied, and a call cannot be killed: only cancelled, then abandoned."""

    def __init__(self, build: WorkerFactory, *, name: str = "loop", grace_s: float = 5.0) -> None:
        self._build, self._name, self._grace_s = build, name, grace_s
        self._worker: Worker | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        if self._worker is None:
            self._worker = self._build()

    async def call(self, request: Any, *, timeout_s: float | None = None) -> Any:
        return await self._run(self._started().handle(request), timeout_s)

    async def publish(self, update: Any, *, timeout_s: float | None = None) -> list[Any]:
        return [await self._run(self._started().apply_update(update), timeout_s)]

    @property
    def description(self) -> Any:
        return self._started().describe()

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

    def _started(self) -> Worker:
        if self._worker is None:
            raise RuntimeError(f"pool {self._name!r} is not open: await its start() first")
        return self._worker

    async def _run(self, work: Coroutine[Any, Any, Any], timeout_s: float | None) -> Any:
        loop = asyncio.get_running_loop()
        call = loop.create_task(contain_failures(work))
        self._calls.add(call)
        # Does what asyncio.wait does at half the cost; this runs once or twice in every rollout.
        wake: asyncio.Future[None] = loop.create_future()

        def notify(_: object = None) -> None:
            if not wake.done():
                wake.set_result(None)

        call.add_done_callback(notify)
        timer = None if timeout_s is None else loop.call_later(timeout_s, notify)
        try:
            await wake
            if not call.done():
                await self._cancel(call)
                raise timeout_error(timeout_s)
            if call.cancelled():
                raise WorkerLost(f"pool {self._name!r} was closed during this call")
            return call.result()
        except asyncio.CancelledError:
            if not call.done():
                await self._cancel(call)
            raise
        finally:
            self._calls.discard(call)
            if timer is not None:
                timer.cancel()

    async def _cancel(self, call: asyncio.Task[Any]) -> None:
        """Cancel a call and give it time to clean up; a call that ignores this is abandoned."""
        call.cancel()
        await asyncio.wait((call,), timeout=self._grace_s)
        if call.done() and not call.cancelled():
            call.exception()  # Retrieved, so that asyncio does not log it: the call is over for its caller.
