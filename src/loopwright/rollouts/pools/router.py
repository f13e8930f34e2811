"""The router: which worker gets the next call. It runs in the caller's process."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

from loopwright.rollouts.pools.base import PoolDown


class RoutedWorker:
    """A worker as the router sees it."""

    load = 0
    """Calls in flight."""
    assigned = 0
    """Calls that it was ever given."""
    node = ""
    """The machine that it runs on; machines fail as a whole."""

    def __init__(self) -> None:
        self.limits: list[int] = []
        """With how many calls at most each of its calls shares it, of those that care."""


B = TypeVar("B", bound=RoutedWorker)


class Router(Generic[B]):
    """Gives each call the least loaded worker; calls wait in order while all are full or missing."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._backends: list[B] = []
        self._waiting: deque[tuple[asyncio.Future[B], str, int | None]] = deque()
        self._down_reason: str | None = None

    @property
    def backends(self) -> tuple[B, ...]:
        """The workers that calls can go to."""
        return tuple(self._backends)

    def add(self, backend: B) -> None:
        """Route calls to this worker from now on."""
        self._down_reason = None
        self._backends.append(backend)
        self._serve_waiting()

    def remove(self, backend: B) -> None:
        """Route no more calls to this worker; calls that hold it still release it."""
        if backend in self._backends:
            self._backends.remove(backend)

    def mark_down(self, reason: str) -> None:
        """Without workers: fail all waiting calls, and all new ones until a worker is added, with PoolDown."""
        if self._backends:
            return
        self._down_reason = reason
        while self._waiting:
            waiting, _, _ = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(PoolDown(reason))

    def on_other_nodes(self, node: str) -> list[B]:
        """The workers that run on other machines than this one."""
        return [backend for backend in self._backends if backend.node != node]

    async def acquire(self, avoid_node: str = "", limit: int | None = None) -> B:
        """The least loaded worker, with this call counted; the caller must release it with the same limit.

        Workers on `avoid_node` are used only if there are no others. With a `limit`, the worker has at most so many
        calls at a time, this one included, until it is released.
        """
        if not self._waiting and (backend := self._pick(avoid_node, limit)) is not None:
            return backend
        if self._down_reason is not None:
            raise PoolDown(self._down_reason)
        waiting: asyncio.Future[B] = asyncio.get_running_loop().create_future()
        self._waiting.append((waiting, avoid_node, limit))
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self.release(waiting.result(), limit)  # It was served and cancelled in the same turn of the event loop.
            elif self._waiting:
                self._serve_waiting()  # It may have been the first, and the others are less particular.
            raise

    def release(self, backend: B, limit: int | None = None) -> None:
        """A call has ended, successfully or not."""
        backend.load -= 1
        if limit is not None:
            backend.limits.remove(limit)
        if self._waiting:
            self._serve_waiting()

    def _pick(self, avoid_node: str, limit: int | None) -> B | None:
        backends = (avoid_node and self.on_other_nodes(avoid_node)) or self._backends
        if not backends:
            return None
        # Of equally loaded workers the one with the fewest calls so far, so that slow callers use all of them too.
        backend = min(backends, key=lambda each: (each.load, each.assigned)) if len(backends) > 1 else backends[0]
        if backend.load >= self._capacity:
            return None
        if limit is not None or any(each.limits for each in backends):
            own = self._capacity if limit is None else limit
            vacant = [each for each in backends if each.load < min(own, self._capacity, *each.limits)]
            if not vacant:
                return None
            backend = min(vacant, key=lambda each: (each.load, each.assigned))
            if limit is not None:
                backend.limits.append(limit)
        backend.load += 1
        backend.assigned += 1
        return backend

    def _serve_waiting(self) -> None:
        while self._waiting:
            waiting, avoid_node, limit = self._waiting[0]
            if not waiting.done():
                backend = self._pick(avoid_node, limit)
                if backend is None:
                    return
                waiting.set_result(backend)
            self._waiting.popleft()
