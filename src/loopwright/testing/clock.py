"""Simulated time: an event loop whose clock jumps to the next timer instead of waiting for it.

Everything that schedules in Loopwright uses the clock of the running loop, so hours of simulated time pass in a moment,
and always in the same order.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Advances the clock instead of waiting for a timer. Without timers it waits, for example for threads."""

    def __init__(self, advance: Callable[[], None]) -> None:
        super().__init__()
        self._advance = advance

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout else timeout)
        if timeout and not ready:
            self._advance()
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time only timers advance."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Selector(self._advance))

    def time(self) -> float:
        return self._now

    def _advance(self) -> None:
        # asyncio has removed cancelled timers by now, so the first one will fire.
        self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]


def simulate(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine until it ends, in simulated time."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)
