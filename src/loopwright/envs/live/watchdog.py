"""The watchdog: breaks into a server of this process that hangs. The steps themselves pay two assignments for it.

A thread looks now and then which call is in progress. If it is the same one for too long, the main thread gets a signal
of our own, which ends a sleep, a wait for a socket or a loop in Python by raising `Hung` there. Native code that does
not return, and steps outside the main thread, cannot be broken into: such a server belongs in a process of its own.
"""

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from loopwright.envs.live.server import ServerLost

T = TypeVar("T")
log = logging.getLogger(__name__)
SIGNAL = signal.SIGRTMIN + 9
"""Nobody's: programs that use real-time signals begin at either end."""
_LONGEST_TICK_S = 1.0
_dogs: list["Watchdog"] = []


class Hung(BaseException):
    """Raised in a server's call that takes too long. No Exception: the server's own `except` must not swallow it."""


class Watchdog:
    """Watches the calls of one environment. `call` says which is in progress: a step by its number, 0 for none.

    Python runs signal handlers at calls and jumps only, so `call = 0` right after a call's end is in time: `Hung` comes
    within the call or not at all.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.call = 0
        self._overdue = self._rare = 0
        self._closed = threading.Event()
        if timeout_s is not None:
            self._tick_s = min(timeout_s / 4, _LONGEST_TICK_S)
            if threading.current_thread() is threading.main_thread() and signal.getsignal(SIGNAL) == signal.SIG_DFL:
                signal.signal(SIGNAL, _bark)  # stays: others may watch as well, and without us it does nothing
            _dogs.append(self)
            threading.Thread(target=self._watch, name="loopwright-watchdog", daemon=True).start()

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()
        if self in _dogs:
            _dogs.remove(self)

    def guard(self, request: str, call: Callable[[], T]) -> T:
        """A call that is rare enough to be made from here; ServerLost if it hangs."""
        watchdog = self  # `bites` looks for this name
        self._rare -= 1
        self.call = self._rare
        try:
            answer = call()
            self.call = 0
        except BaseException as error:
            self.call = 0
            if isinstance(error, Hung):
                raise ServerLost(watchdog.reason(request)) from None
            raise
        return answer

    def reason(self, request: str) -> str:
        """What is said of a call that was broken into."""
        return f"the server gave no answer to {request!r} within {self.timeout_s:g} s (timeout_s)"

    def _watch(self) -> None:
        limit_s = self.timeout_s or 0.0
        seen, waited_s, told = 0, 0.0, 0
        # Ticks are counted, not time: a program that was stopped (Ctrl-Z) has not been waiting.
        while not self._closed.wait(self._tick_s):
            call = self.call
            waited_s = waited_s + self._tick_s if call == seen else 0.0
            seen = call
            if not call or waited_s < limit_s:
                continue
            self._overdue = call
            # Again at each tick: a server may have swallowed the first one.
            if signal.getsignal(SIGNAL) is _bark:
                signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
            if waited_s >= 2 * limit_s and told != call:
                told = call
                log.error(
                    "the server has taken more than %g s (timeout_s) and cannot be interrupted: it is in native code, "
                    "or not in the main thread. End this process, and give the server one of its own: "
                    "loopwright serve-env",
                    limit_s,
                )

    def bites(self, frame: FrameType | None) -> bool:
        """Whether the interrupted frame is in a call of ours that is overdue."""
        if not self.call or self.call != self._overdue:
            return False
        while frame is not None and frame.f_locals.get("watchdog") is not self:
            frame = frame.f_back
        return frame is not None


def _bark(_: int, frame: FrameType | None) -> None:
    if any(dog.bites(frame) for dog in _dogs[:]):
        raise Hung
