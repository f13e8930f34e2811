"""The pool of `workers = 0`: one worker, in this process and event loop."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from loopwright.rollouts.pools.base import (
    EventLoopBlocked,
    Pool,
    Worker,
    WorkerFactory,
    WorkerLost,
    contain_failures,
    timeout_error,
)
from loopwright.rollouts.pools.steps import StepWatch, WatchedCall, watch_tasks

log = logging.getLogger(__name__)


class LocalPool(Pool):
    """One worker in this process. Nothing is copied, and a call cannot be killed: only cancelled, then abandoned."""

    def __init__(self, build: WorkerFactory, *, name: str = "loop", grace_s: float = 5.0) -> None:
        self._build, self._name, self._grace_s = build, name, grace_s
        self._worker: Worker | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._watch = StepWatch()

    async def start(self) -> None:
        if self._worker is None:
            self._worker = self._build()
            watch_tasks()
            self._watch.interrupt()

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
            _, stubborn = await asyncio.wait(set(self._calls), timeout=self._grace_s)
            if stubborn:
                log.warning(
                    "%d calls of %s ignored their cancellation for %g s and are abandoned",
                    len(stubborn),
                    worker.describe_calls(),
                    self._grace_s,
                )
        try:
            async with asyncio.timeout(self._grace_s):
                await worker.close()
        except TimeoutError:
            log.warning("%s did not close within %g s and is abandoned", worker.describe_calls(), self._grace_s)
        finally:
            self._watch.close()

    def _started(self) -> Worker:
        if self._worker is None:
            raise RuntimeError(f"pool {self._name!r} is not open: await its start() first")
        return self._worker

    async def _run(self, work: Coroutine[Any, Any, Any], timeout_s: float | None) -> Any:
        loop = asyncio.get_running_loop()
        watched = WatchedCall(limit_s=timeout_s)
        call = self._watch.start(watched, contain_failures(work), self._started().describe_calls())
        self._calls.add(call)
        # Does what asyncio.wait does at half the cost; this runs once or twice in every rollout.
        wake: asyncio.Future[None] = loop.create_future()

        def notify(_: object = None) -> None:
            if not wake.done():
                wake.set_result(None)

        call.add_done_callback(notify)
        timer = None if timeout_s is None else loop.call_later(timeout_s, notify)

        def move_deadline(stall_s: float) -> None:
            nonlocal timer
            if timer is not None:
                timer.cancel()
                timer = loop.call_at(timer.when() + stall_s, notify)

        watched.on_stall.append(move_deadline)
        watched.on_give_up = notify
        try:
            await wake
            if not call.done():
                if watched.hopeless:
                    raise EventLoopBlocked(watched.hopeless)
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
