"""Threads for synchronous functions of the user's: off the event loop, and left behind when they never return."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from loopwright.core.errors import LoopwrightError

MAX_HANGING_CALLS = 512
"""How many calls that never return may be left behind before nothing more is called."""


class TooManyHangingCalls(LoopwrightError, RuntimeError):
    """So many calls never returned that no more are made."""


class _Call:
    """A call on its way to a thread and back."""

    begun = ended = left = False

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
        else:  # what would end the event loop, or means something else to it
            failure = RuntimeError(f"the call raised {error!r}")
            failure.__cause__ = error
            self.result.set_exception(failure)


class Threads:
    """Runs calls in daemon threads, so that one that hangs neither holds up the others nor the end of the process.

    A call that is cancelled or too late cannot be stopped, but its thread no longer counts: another takes its place.
    """

    def __init__(self, name: str, *, most: int = 64) -> None:
        self._name, self._most = name, most
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._alive = self._idle = self._waiting = self._left = 0
        self._closed = False

    async def run(self, work: Callable[[], Any]) -> Any:
        """What the call returns or raises; an exit that it asks for is an exception like any other."""
        call = _Call(work)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the threads of {self._name} are closed")
            if self._left >= MAX_HANGING_CALLS:
                raise TooManyHangingCalls(
                    f"{self._left} calls never returned, so no more are made. Find out where they hang."
                )
            self._waiting += 1
            self._calls.put(call)
            self._grow()
        try:
            return await call.result
        finally:
            self._leave(call)

    def close(self) -> None:
        """Let idle threads go; those at work are left to themselves."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in range(self._alive):
                    self._calls.put(None)

    def _grow(self) -> None:
        if self._waiting > self._idle and self._alive < self._most:
            self._alive += 1
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def _leave(self, call: _Call) -> None:
        """Nobody waits for this call any more: unless it has ended, its thread loses its place."""
        with self._lock:
            if call.begun and not call.ended:
                call.left = True
                self._left += 1
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
                call.begun = True
            value, error = None, None
            try:
                value = call.work()
            except BaseException as raised:  # noqa: BLE001  it is handed to whoever waits
                error = raised
            with self._lock:
                call.ended = True
                self._left -= call.left
            with suppress(RuntimeError):  # the event loop may be gone by now
                call.loop.call_soon_threadsafe(call.settle, value, error)
            if call.left:
                return
