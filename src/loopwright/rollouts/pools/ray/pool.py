"""The pool of `workers = 1` and more: a worker in each of so many Ray actors, which are replaced when they die."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from loopwright.rollouts.pools.base import Pool, WorkerFactory, WorkerLost, timeout_error
from loopwright.rollouts.pools.parcel import pack, unpack, unpack_exception
from loopwright.rollouts.pools.ray.actor import (
    ActorLost,
    ActorPlacement,
    Deadline,
    Method,
    WorkerActor,
    awaited,
    brief,
    own_node,
)
from loopwright.rollouts.pools.ray.launch import RayConnection, Reservation, check_group, placed, reserve, vacant
from loopwright.rollouts.pools.resources import ResourceRequest, Strategy
from loopwright.rollouts.pools.router import Router

_LONGEST_PAUSE_S = 30.0
_MOST_FAILURES = 4
"""Replacements in a row that may fail before callers are told that there is no hope."""
_SETTLE_S = 2.0
"""How long the death of a node takes to be known of all its actors."""


class RayPool(Pool):
    """Workers in Ray actors. Calls go to the least loaded; the router lives here, in the caller.

    Actors are placed in the bundles of a placement group: in a given one from `start_bundle` on, or in one of their
    own with the same resources.
    """

    def __init__(
        self,
        build: WorkerFactory,
        *,
        workers: int = 1,
        cpus: float = 1.0,
        memory_bytes: int | None = None,
        name: str = "loop",
        named: str | None = None,
        home: Path | None = None,
        placement_group: PlacementGroup | None = None,
        start_bundle: int = 0,
        strategy: Strategy = "PACK",
        max_concurrency: int = 1000,
        grace_s: float = 5.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        self._ask = ResourceRequest(name, workers, cpus, memory_bytes)
        self._build, self._name, self._named, self._home = build, name, named, home
        self._given, self._start_bundle, self._strategy = placement_group, start_bundle, strategy
        self._max_concurrency, self._grace_s, self._start_timeout_s = max_concurrency, grace_s, start_timeout_s
        self._place: ActorPlacement | None = None
        self._router: Router[WorkerActor] = Router(max_concurrency)
        self._slots: list[asyncio.Task[WorkerActor]] = []
        self._watches: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        self._update: bytes | None = None
        self._description: Any = None
        self._parcel = b""
        self._own_node = ""
        self._open = False
        self._connection: RayConnection | None = None
        self._reservation: Reservation | None = None

    # -- for callers ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._open:
            return
        self._router = Router(self._max_concurrency)
        self._parcel = pack(self._build, "the builder")
        self._connection = RayConnection()
        self._own_node = own_node()
        try:
            path = () if self._home is None else (str(self._home.absolute()),)
            group = await self._group()
            self._place = ActorPlacement(self._ask, group, self._start_bundle, self._max_concurrency, path, self._named)
            self._open = True
            self._slots = [asyncio.create_task(self._begin(index)) for index in range(self._ask.workers)]
            await asyncio.gather(*self._slots)
        except BaseException:
            await self.close()
            raise

    async def _group(self) -> PlacementGroup:
        if self._given is None:
            self._reservation = await reserve([self._ask], strategy=self._strategy)
            return self._reservation.group
        check_group(self._ask, self._given, self._start_bundle)
        await placed(self._given, [self._ask])
        await vacant(self._ask, self._given, self._start_bundle)
        return self._given

    async def call(self, request: Any, *, timeout_s: float | None = None) -> Any:
        self._check_open()
        deadline = Deadline.after(timeout_s)
        losses, avoid = 0, ""
        self._in_flight += 1
        try:
            while True:
                try:
                    return await self._issue(request, deadline, avoid)
                except ActorLost as lost:
                    losses += lost.blamed
                    self._check_lost(losses, str(lost))
                    avoid = await self._elsewhere(lost.node, deadline)
        finally:
            self._in_flight -= 1

    async def publish(self, update: Any, *, timeout_s: float | None = None) -> list[Any]:
        self._check_open()
        self._update = parcel = pack(update, "update")
        order = pack((timeout_s, timeout_s, update), "update")
        slots = range(len(self._slots))
        return await asyncio.gather(*(self._publish(index, parcel, order, timeout_s) for index in slots))

    @property
    def description(self) -> Any:
        self._check_open()
        return self._description

    @property
    def in_flight(self) -> int:
        return self._in_flight

    async def close(self) -> None:
        was_open, self._open = self._open, False
        for task in (*self._watches, *self._slots):
            task.cancel()
        self._router.give_up(str(self._closed()))
        members = self._router.seats
        if was_open and members:
            await asyncio.wait([awaited(member.actor.end.remote()) for member in members], timeout=self._grace_s)
        for member in members:
            self._router.leave(member)
            member.kill()
        self._router.give_up(str(self._closed()))
        if self._slots:
            await asyncio.wait(self._slots)
        self._slots = []
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # -- one call -------------------------------------------------------------------------------------------------

    async def _issue(self, request: Any, deadline: Deadline, avoid: str) -> Any:
        try:
            async with asyncio.timeout_at(deadline.at):
                member = await self._router.take(avoid)
        except TimeoutError:
            raise timeout_error(deadline.timeout_s) from None
        try:
            parcel = pack((deadline.left_s(), deadline.timeout_s, request))
            return await self._answer(member, member.handle, parcel, deadline)
        finally:
            self._router.give_back(member)

    async def _answer(self, member: WorkerActor, method: Method, parcel: bytes, deadline: Deadline) -> Any:
        """What an actor answers; it keeps the deadline by itself, and is killed if it does not."""
        try:
            ref = method(parcel)
            async with asyncio.timeout_at(None if deadline.at is None else deadline.at + self._grace_s):
                failure, answer = unpack(await ref)
        except TimeoutError:
            self._lose(member, f"a call blocked it {self._grace_s:g} s beyond its deadline", killed=True)
            raise timeout_error(deadline.timeout_s) from None
        except asyncio.CancelledError:
            await self._cancel(member, ref)
            raise
        except RayError as error:
            self._lose(member, brief(error))
            raise ActorLost(member) from None
        if failure is not None:
            raise unpack_exception(failure, f"worker {member.index} of pool {self._name!r}")
        return answer

    async def _elsewhere(self, node: str, deadline: Deadline) -> str:
        """The node that a call must not go to again, after its worker there died: perhaps all of the node is dying."""
        if node == self._own_node:
            return ""
        if not self._router.elsewhere(node):
            left_s = deadline.left_s()
            await asyncio.sleep(_SETTLE_S if left_s is None else min(_SETTLE_S, left_s))
        return node

    async def _cancel(self, member: WorkerActor, ref: Any) -> None:
        with suppress(Exception):
            ray.cancel(ref)
        ending = awaited(ref)
        await asyncio.wait((ending,), timeout=self._grace_s)
        if not ending.done():
            self._lose(member, f"a cancelled call did not end within {self._grace_s:g} s", killed=True)

    async def _publish(self, index: int, update: bytes, order: bytes, timeout_s: float | None) -> Any:
        deadline = Deadline.after(timeout_s)
        losses = 0
        while True:
            member = await self._settled(index)
            if member.update is update:  # It took a dead one's place and was told on its way in.
                return member.told
            try:
                answer = await self._answer(member, member.apply_update, order, deadline)
            except ActorLost as lost:
                losses += 1
                self._check_lost(losses, str(lost))
            else:
                member.update, member.told = update, answer
                return answer

    def _check_open(self) -> None:
        if not self._open:
            raise RuntimeError(f"pool {self._name!r} is not open: await its start() first")

    def _check_lost(self, losses: int, reason: str) -> None:
        if not self._open:
            raise self._closed()
        if losses > 1:
            raise WorkerLost(
                f"pool {self._name!r}: two workers died with this call in them, the last one because {reason}. "
                "Look into Ray's logs for its process (/tmp/ray/session_latest/logs)."
            )

    def _closed(self) -> WorkerLost:
        return WorkerLost(f"pool {self._name!r} was closed with this call in it")

    # -- the life of an actor -------------------------------------------------------------------------------------

    async def _begin(self, index: int) -> WorkerActor:
        """Make an actor and its worker, and let calls go to it."""
        if self._place is None:
            raise RuntimeError("a pool has no place before it is started")
        member = self._place.member(index)
        where = f"worker {index} of pool {self._name!r}"
        try:
            async with asyncio.timeout(self._start_timeout_s) as deadline:
                member.node = await member.actor.node.remote()
                update = self._update
                failure, answer = unpack(await member.actor.begin.remote(self._parcel, update))
                self._description, told = answer or (None, None)
                while failure is None and update is not self._update:  # There were newer ones meanwhile.
                    update = self._update
                    failure, told = unpack(await member.apply_update(pack((None, None, unpack(update or b"")))))
        except TimeoutError as error:
            member.kill()
            if not deadline.expired():
                raise
            raise WorkerLost(f"{where} was not ready within {self._start_timeout_s:g} s") from error
        except RayError as error:
            member.kill()
            raise WorkerLost(f"{where} died before it was ready: {brief(error)}") from error
        except BaseException:
            member.kill()
            raise
        if failure is not None:
            member.kill()
            raise unpack_exception(failure, where)
        member.update, member.told = update, told
        self._router.join(member)
        watch = asyncio.create_task(self._watch(member))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return member

    async def _watch(self, member: WorkerActor) -> None:
        """Learn of an actor's death at once, also while no call is in it."""
        try:
            await member.actor.live.remote()
        except RayError as error:
            self._lose(member, brief(error))

    def _lose(self, member: WorkerActor, reason: str, *, killed: bool = False) -> None:
        """Have a dead actor, or one that has to die, replaced; whoever comes first says why."""
        if member.lost is not None or not self._open:
            return
        member.lost, member.killed = reason, killed
        self._router.leave(member)
        member.kill()
        self._slots[member.index] = asyncio.create_task(self._replace(member.index))

    async def _replace(self, index: int) -> WorkerActor:
        pause_s, failures = 0.5, 0
        while True:
            try:
                return await self._begin(index)
            except Exception as error:  # noqa: BLE001  Whatever stands in its way may pass: nodes come and go.
                failures += 1
                if failures >= _MOST_FAILURES:
                    self._router.give_up(f"pool {self._name!r} has no worker left: {error}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _settled(self, index: int) -> WorkerActor:
        """The worker of a slot, once it is there."""
        done, _ = await asyncio.wait((self._slots[index],), timeout=self._start_timeout_s)
        if not done or not self._open:
            raise WorkerLost(f"worker {index} of pool {self._name!r} died and could not be replaced yet")
        return self._slots[index].result()
