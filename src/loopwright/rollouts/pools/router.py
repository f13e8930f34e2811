"""The router: which worker gets the next call. It lives in the caller and holds no process of its own."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

from loopwright.rollouts.pools.base import PoolDown


class Backend:
    """A worker as the router sees it: how many calls are in it."""

    load = 0
    served = 0
    node = ""
    """The machine that it is on; machines die as a whole."""


S = TypeVar("S", bound=Backend)


def _burden(seat: Backend) -> tuple[int, int]:
    # Of equally loaded ones the one that did least, so that slow callers use all of them too.
    return seat.load, seat.served


class Router(Generic[S]):
    """Gives each call the least loaded worker; while all are full, or none is there, calls wait in order."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._seats: list[S] = []
        self._waiting: deque[asyncio.Future[S]] = deque()
        self._hopeless: str | None = None

    @property
    def seats(self) -> tuple[S, ...]:
        """Those that calls can go to."""
        return tuple(self._seats)

    def join(self, seat: S) -> None:
        """A worker is ready."""
        self._hopeless = None
        self._seats.append(seat)
        self._serve()

    def leave(self, seat: S) -> None:
        """A worker is gone; calls that are in it are still given back by those who took it."""
        if seat in self._seats:
            self._seats.remove(seat)

    def give_up(self, reason: str) -> None:
        """No worker is there and none could be made: whoever waits, or comes until one joins, gets the reason."""
        if self._seats:
            return
        self._hopeless = reason
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(PoolDown(reason))

    def elsewhere(self, node: str) -> list[S]:
        """The workers that are on other machines than this one."""
        return [seat for seat in self._seats if seat.node != node]

    async def take(self, avoid: str = "") -> S:
        """The least loaded worker, with this call counted; to be given back whatever becomes of the call.

        Those of the machine `avoid` are taken only if there are no others.
        """
        if not self._waiting and (seat := self._pick(avoid)) is not None:
            return seat
        if self._hopeless is not None:
            raise PoolDown(self._hopeless)
        waiting: asyncio.Future[S] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self.give_back(waiting.result())  # It was served and cancelled in one turn of the event loop.
            raise

    def give_back(self, seat: S) -> None:
        """A call is over, well or badly."""
        seat.load -= 1
        if self._waiting:
            self._serve()

    def _pick(self, avoid: str = "") -> S | None:
        seats = (avoid and self.elsewhere(avoid)) or self._seats
        if not seats:
            return None
        seat = min(seats, key=_burden) if len(seats) > 1 else seats[0]
        if seat.load >= self._capacity:
            return None
        seat.load += 1
        seat.served += 1
        return seat

    def _serve(self) -> None:
        while self._waiting:
            if self._waiting[0].done():
                self._waiting.popleft()
                continue
            seat = self._pick()
            if seat is None:
                return
            self._waiting.popleft().set_result(seat)
