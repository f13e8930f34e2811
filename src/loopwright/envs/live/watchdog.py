"""The watchdog: interrupts a server in this process that hangs. A step pays two assignments for it.

A thread checks periodically which call is in progress. If it is the same one for too long, the main thread gets a
signal, whose handler raises `Hung` there: that ends a sleep, a wait for a socket or a loop in Python. Native code that
does not return, and steps outside the main thread, cannot be interrupted: run such a server in another process.
"""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeVar

from loopwright.envs.live.server import ServerLost

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
log = logging.getLogger(__name__)
SIGNAL = signal.SIGRTMIN + 9
"""An unused signal: programs that use real-time signals start at either end of their range."""
_MAX_TICK_S = 1.0
_watchdogs: list["Watchdog"] = []
_server_callers: set[CodeType] = set()


def calls_server(function: F) -> F:
    """Mark a function that calls a server and has a local variable `watchdog`, so that `server_calls` finds it.

    The stack is read only when a signal comes, so steps pay nothing for it.
    """
    assert "watchdog" in function.__code__.co_varnames  # noqa: S101
    _server_callers.add(function.__code__)
    return function


def server_calls(frame: FrameType | None) -> Iterator["Watchdog"]:
    """The watchdogs of the server calls that this frame is part of."""
    for caller in stack_of(frame):
        watchdog = caller.f_locals.get("watchdog") if caller.f_code in _server_callers else None
        if watchdog is not None and watchdog.call:
            yield watchdog


def stack_of(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


class Hung(BaseException):
    """Raised in a server's call that takes too long. Not an Exception, so that the server does not swallow it."""


class Watchdog:
    """Watches the calls of one environment. `call` identifies the one in progress: the number of a step, or 0 for none.

    Python runs signal handlers only at calls and jumps, so `call = 0` right after a call is in time: `Hung` is raised
    within the call or not at all.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.call = 0
        self._overdue_call = self._guarded_call = 0
        self._closed = threading.Event()
        if timeout_s is not None:
            self._tick_s = min(timeout_s / 4, _MAX_TICK_S)
            if threading.current_thread() is threading.main_thread() and signal.getsignal(SIGNAL) == signal.SIG_DFL:
                signal.signal(SIGNAL, _handle)  # stays installed: without watchdogs it does nothing
            _watchdogs.append(self)
            threading.Thread(target=self._watch, name="loopwright-watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self in _watchdogs:
            _watchdogs.remove(self)

    @calls_server
    def guard(self, request: str, call: Callable[[], T]) -> T:
        """Make a call other than a step. Raises ServerLost if it hangs."""
        watchdog = self
        self._guarded_call -= 1
        self.call = self._guarded_call
        try:
            result = call()
            self.call = 0
        except BaseException as error:
            self.call = 0
            if isinstance(error, Hung):
                raise ServerLost(watchdog.reason(request)) from None
            raise
        return result

    def reason(self, request: str) -> str:
        """The message for a call that was interrupted."""
        return f"the server did not respond to {request!r} within {self.timeout_s:g} s (timeout_s)"

    def _watch(self) -> None:
        limit_s = self.timeout_s or 0.0
        last_call, waited_s, logged_call = 0, 0.0, 0
        # Ticks are counted instead of time: a process that was suspended (Ctrl-Z) has not been waiting.
        while not self._closed.wait(self._tick_s):
            call = self.call
            waited_s = waited_s + self._tick_s if call == last_call else 0.0
            last_call = call
            if not call or waited_s < limit_s:
                continue
            self._overdue_call = call
            # Again at each tick: a server may have swallowed the first one.
            if signal.getsignal(SIGNAL) is _handle:
                signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
            if waited_s >= 2 * limit_s and logged_call != call:
                logged_call = call
                log.error(
                    "the server has taken more than %g s (timeout_s) and cannot be interrupted: it is in native code, "
                    "or not in the main thread. End this process, and run the server in another one: "
                    "loopwright serve-env",
                    limit_s,
                )

    def is_overdue(self, frame: FrameType | None) -> bool:
        """Whether the interrupted frame is in an overdue call of this watchdog's environment."""
        return self.call == self._overdue_call and self in server_calls(frame)


def _handle(_: int, frame: FrameType | None) -> None:
    if any(watchdog.is_overdue(frame) for watchdog in _watchdogs[:]):
        raise Hung
