"""Slots: how many trials run at a time, and on which CPU cores.

asyncio.Semaphore stays bound to the event loop in which it was first contended, and each run has its own event loop.
"""

import asyncio
import os
from collections import deque


class Slots:
    """Numbered permits, granted in the order of the requests."""

    def __init__(self, count: int, *, pin_cpus: bool = False) -> None:
        if count < 1:
            raise ValueError(f"parallel = {count}: must be at least 1")
        self._free = deque(range(count))
        self._waiting: deque[asyncio.Future[int]] = deque()
        self._cores = core_sets(sorted(os.sched_getaffinity(0)), count) if pin_cpus else None

    async def acquire(self) -> int:
        """Wait for a free slot and take it."""
        if self._free:
            return self._free.popleft()
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(future.result())
            raise

    def release(self, slot: int) -> None:
        """Return a slot; the longest waiting request gets it."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(slot)
                return
        # Last in, first out: the most recently used slot has a warm worker and warm caches.
        self._free.appendleft(slot)

    def cores(self, slot: int) -> frozenset[int] | None:
        """The cores of a slot, or None if trials are not pinned."""
        return self._cores[slot] if self._cores else None


def core_sets(cores: list[int], count: int) -> list[frozenset[int]]:
    """`count` sets of equal size, disjoint as long as there are enough cores."""
    size = max(1, len(cores) // count)
    return [frozenset(cores[(slot * size + i) % len(cores)] for i in range(size)) for slot in range(count)]
