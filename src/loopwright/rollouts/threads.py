"""Threads for users' synchronous functions: off the event loop, and abandoned if they never return."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from loopwright.core.errors import LoopwrightError

MAX_HANGING_CALLS = 512
"""How many calls may hang before no more are made."""


class TooManyHangingCalls(LoopwrightError, RuntimeError):
    """So many calls hang that no more are made."""


class _Call:
    """A call that a thread runs for the event loop."""

    is_started = is_finished = is_abandoned = False

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Any] = self.loop.create_future()

    def settle(self, value: Any, error: BaseException | None) -> None:
        if self.result.done():
            return
        if error is None:
            self.result.set_result(value)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            self.result.set_exception(error)
        else:  # it would end the event loop, or has another meaning there
            failure = RuntimeError(f"the call raised {error!r}")
            failure.__cause__ = error
            self.result.set_exception(failure)


class Threads:
    """Runs calls in daemon threads, so that a hanging call blocks neither the others nor the end of the process.

    A call that is cancelled cannot be stopped, but its thread no longer counts towards the limit.
    """

    def __init__(self, name: str, *, max_threads: int = 64) -> None:
        self._name, self._max_threads = name, max_threads
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._alive = self._idle = self._waiting = self._hanging = 0
        self._closed = False

    async def run(self, work: Callable[[], Any]) -> Any:
        """What the call returns or raises; a SystemExit inside is an exception like any other."""
        call = _Call(work)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the threads {self._name!r} are closed")
            if self._hanging >= MAX_HANGING_CALLS:
                raise TooManyHangingCalls(
                    f"{self._hanging} calls never returned, so no more are made. Check where they hang."
                )
            self._waiting += 1
            self._calls.put(call)
            self._grow()
        try:
            return await call.result
        finally:
            self._abandon(call)

    def close(self) -> None:
        """End idle threads; running calls are not interrupted."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in range(self._alive):
                    self._calls.put(None)

    def _grow(self) -> None:
        if self._waiting > self._idle and self._alive < self._max_threads:
            self._alive += 1
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def _abandon(self, call: _Call) -> None:
        """Nobody waits for this call any more: unless it has finished, its thread no longer counts."""
        with self._lock:
            if call.is_started and not call.is_finished:
                call.is_abandoned = True
                self._hanging += 1
                self._alive -= 1
                self._grow()

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            call = self._calls.get()
            with self._lock:
                self._idle -= 1
                if call is None:
                    return
                self._waiting -= 1
                if call.result.cancelled():
                    continue
                call.is_started = True
            value, error = None, None
            try:
                value = call.work()
            except BaseException as exception:  # noqa: BLE001  raised to the caller
                error = exception
            with self._lock:
                call.is_finished = True
                self._hanging -= call.is_abandoned
            with suppress(RuntimeError):  # the event loop may be gone by now
                call.loop.call_soon_threadsafe(call.settle, value, error)
            if call.is_abandoned:
                return
