"""Simulated time: an event loop whose clock jumps to the next timer instead of waiting for it.

Everything that schedules in Loopwright asks the running loop for the time, so hours of production pass in a moment,
and always in the same order.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Waits for nothing while a timer is set: it lets time pass instead. Without timers, threads are waited for."""

    def __init__(self, let_pass: Callable[[], None]) -> None:
        super().__init__()
        self._let_pass = let_pass

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout else timeout)
        if timeout and not ready:
            self._let_pass()
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Nothing but timers makes its time pass."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Selector(self._jump))

    def time(self) -> float:
        return self._now

    def _jump(self) -> None:
        # By now asyncio has dropped the timers that were cancelled, so that the first is one that will go off.
        self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]


def simulate(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in simulated time."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)
