"""The pool of `workers >= 1`: one worker in each of several Ray actors, which are replaced when they die."""

import asyncio
import logging
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from loopwright.execution.ray.connection import RayConnection
from loopwright.rollouts.pools.base import EventLoopBlocked, Pool, WorkerFactory, WorkerLost, timeout_error
from loopwright.rollouts.pools.ray.actor import (
    ActorLost,
    ActorPlacement,
    Deadline,
    Method,
    WorkerActor,
    current_node_id,
    find_culprit,
    first_line,
    wait_for,
)
from loopwright.rollouts.pools.ray.launch import (
    PLACEMENT_TIMEOUT_S,
    check_group,
    find_group,
    release,
    reserve,
    wait_until_placed,
    wait_until_vacant,
)
from loopwright.rollouts.pools.resources import ResourceRequest, Strategy
from loopwright.rollouts.pools.router import Router
from loopwright.rollouts.pools.serialization import pack, unpack, unpack_exception
from loopwright.rollouts.pools.steps import BLOCKING_HINT

log = logging.getLogger(__name__)
_MAX_PAUSE_S = 30.0
_MAX_FAILURES = 4
"""Failed replacements in a row after which the pool counts as down."""
_MAX_OTHERS = 20
"""How often a call is issued again because its worker died of another call, or of an unknown cause."""
_NODE_DEATH_S = 2.0
"""How long it takes until all actors of a dead node are known to be dead."""


class RayPool(Pool):
    """Workers in Ray actors. Calls go to the least loaded one; the router runs here, in the caller.

    Actors are placed in the bundles of a placement group: from `start_bundle` of the given one, or in a group that the
    pool creates. A `request` says all of this at once, and may name a group. A relative `import_dir` is below the
    actors' working directory.
    """

    def __init__(
        self,
        build: WorkerFactory,
        *,
        workers: int = 1,
        cpus: float = 1.0,
        memory_bytes: int | None = None,
        name: str = "loop",
        request: ResourceRequest | None = None,
        actor_name: str | None = None,
        import_dir: Path | None = None,
        placement_group: PlacementGroup | None = None,
        start_bundle: int = 0,
        strategy: Strategy = "PACK",
        max_concurrency: int = 1000,
        grace_s: float = 5.0,
        start_timeout_s: float = 120.0,
        wait_s: float = PLACEMENT_TIMEOUT_S,
    ) -> None:
        self._request = request or ResourceRequest(
            name, workers, cpus, memory_bytes, strategy=strategy, start_bundle=start_bundle
        )
        self._build, self._name, self._actor_name, self._import_dir = build, self._request.name, actor_name, import_dir
        self._user_group, self._wait_s = placement_group, wait_s
        self._max_concurrency, self._grace_s, self._start_timeout_s = max_concurrency, grace_s, start_timeout_s
        self._placement: ActorPlacement | None = None
        self._router: Router[WorkerActor] = Router(max_concurrency)
        self._slots: list[asyncio.Task[WorkerActor]] = []
        self._watches: set[asyncio.Task[None]] = set()
        self._in_flight, self._numbers = 0, count(1)
        self._update: bytes | None = None
        self._description: Any = None
        self._calls = ""
        """What calls run, for messages."""
        self._packed_build = b""
        self._own_node = ""
        self._open = False
        self._connection: RayConnection | None = None
        self._own_group: PlacementGroup | None = None

    # -- for callers ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._open:
            return
        self._router = Router(self._max_concurrency)
        self._packed_build = pack(self._build, "the builder")
        self._connection = RayConnection()
        self._own_node = current_node_id()
        request, group = self._request, self._user_group
        try:
            path = () if self._import_dir is None else (str(self._import_dir),)
            if group is None and request.group is not None:
                group = find_group(request.group)
            if group is None:
                group = self._own_group = await reserve(request, timeout_s=self._wait_s)
            else:
                check_group(request, group)
                await wait_until_placed(group, request, timeout_s=self._wait_s)
                await wait_until_vacant(request, group, timeout_s=self._wait_s)
            self._placement = ActorPlacement(request, group, self._max_concurrency, path, self._actor_name)
            self._open = True
            self._slots = [asyncio.create_task(self._start_actor(index)) for index in range(request.workers)]
            await asyncio.gather(*self._slots)
        except BaseException:
            await self.close()
            raise

    async def call(self, request: Any, *, timeout_s: float | None = None) -> Any:
        self._check_open()
        number, deadline = next(self._numbers), Deadline.after(timeout_s)
        losses, others, avoid_node = 0, 0, ""
        limit: int | None = None
        self._in_flight += 1
        try:
            while True:
                try:
                    return await self._issue(number, request, deadline, avoid_node, limit)
                except ActorLost as lost:
                    culprit, neighbours = await lost.culprit(), lost.actor.calls_at_end
                    if culprit == -number:
                        raise EventLoopBlocked(
                            f"{self._calls} blocked the event loop of its worker, which was ended. {BLOCKING_HINT}"
                        ) from lost
                    if culprit == number or (culprit == 0 and limit == 1):
                        losses += 1
                    else:
                        others += 1
                        # With half as many neighbours, and alone in the end: then innocent ones survive, and who ends
                        # processes in a thread is found.
                        limit = max(1, min(neighbours, limit or neighbours) // 2)
                        deadline = Deadline.after(timeout_s)  # it starts again through no fault of its own
                    self._check_losses(losses, str(lost), others)
                    avoid_node = await self._node_to_avoid(lost.node, deadline)
        finally:
            self._in_flight -= 1

    async def publish(self, update: Any, *, timeout_s: float | None = None) -> list[Any]:
        self._check_open()
        self._update = data = pack(update, "an update")
        request = pack((0, timeout_s, timeout_s, update), "an update")
        slots = range(len(self._slots))
        return await asyncio.gather(*(self._publish_to(index, data, request, timeout_s) for index in slots))

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
        self._router.mark_down(str(self._closed_error()))
        actors = self._router.backends
        if was_open and actors:
            stops = {wait_for(actor.actor.stop.remote()): actor for actor in actors}
            _, pending = await asyncio.wait(stops, timeout=self._grace_s)
            for index in sorted(stops[stop].index for stop in pending):
                log.warning(
                    "worker %d of pool %r was killed: its calls ignored their cancellation for %g s",
                    index,
                    self._name,
                    self._grace_s,
                )
        for actor in actors:
            self._router.remove(actor)
            actor.discard()
        self._router.mark_down(str(self._closed_error()))
        if self._slots:
            await asyncio.wait(self._slots)
        self._slots = []
        if self._own_group is not None:
            release(self._own_group)
            self._own_group = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # -- one call -------------------------------------------------------------------------------------------------

    async def _issue(
        self, number: int, request: Any, deadline: Deadline, avoid_node: str, limit: int | None = None
    ) -> Any:
        if limit is not None:
            actor = await self._router.acquire(avoid_node, limit)
            deadline = Deadline.after(deadline.timeout_s)  # the others took the time until there was room
        else:
            try:
                async with asyncio.timeout_at(deadline.at):
                    actor = await self._router.acquire(avoid_node)
            except TimeoutError:
                raise timeout_error(deadline.timeout_s) from None
        try:
            data = pack((number, deadline.left_s(), deadline.timeout_s, request))
            return await self._await_answer(actor, actor.handle, data, deadline, number)
        finally:
            self._router.release(actor, limit)

    async def _await_answer(
        self, actor: WorkerActor, method: Method, data: bytes, deadline: Deadline, number: int = 0
    ) -> Any:
        """An actor's answer; the actor enforces the deadline itself, and is killed if it does not."""
        try:
            ref = method(data)
            async with asyncio.timeout_at(None if deadline.at is None else deadline.at + self._grace_s):
                failure, answer = unpack(await ref)
        except TimeoutError:
            self._replace(actor, f"a call blocked it {self._grace_s:g} s beyond its deadline", killed=True)
            lost = ActorLost(actor)
            if await lost.culprit() not in (None, number):
                raise lost from None  # it is late because another call blocks the actor
            raise timeout_error(deadline.timeout_s) from None
        except asyncio.CancelledError:
            with suppress(Exception):
                ray.cancel(ref)
            ending = wait_for(ref)
            await asyncio.wait((ending,), timeout=self._grace_s)
            if not ending.done():
                self._replace(actor, f"a cancelled call did not end within {self._grace_s:g} s", killed=True)
            raise
        except RayError as error:
            self._replace(actor, first_line(error))
            raise ActorLost(actor) from None
        if failure is not None:
            raise unpack_exception(failure, f"worker {actor.index} of pool {self._name!r}")
        return answer

    async def _node_to_avoid(self, node: str, deadline: Deadline) -> str:
        """The node that a retry must not use after its worker died there, since the whole node may be dying."""
        if node == self._own_node:
            return ""
        if not self._router.on_other_nodes(node):
            left_s = deadline.left_s()
            await asyncio.sleep(_NODE_DEATH_S if left_s is None else min(_NODE_DEATH_S, left_s))
        return node

    async def _publish_to(self, index: int, update: bytes, request: bytes, timeout_s: float | None) -> Any:
        deadline = Deadline.after(timeout_s)
        losses = 0
        while True:
            done, _ = await asyncio.wait((self._slots[index],), timeout=self._start_timeout_s)
            if not done or not self._open:
                raise WorkerLost(f"worker {index} of pool {self._name!r} died and is not replaced yet")
            actor = self._slots[index].result()
            if actor.update is update:  # It replaced a dead actor and applied the update when it started.
                return actor.update_answer
            try:
                answer = await self._await_answer(actor, actor.apply_update, request, deadline)
            except ActorLost as lost:
                losses += 1
                self._check_losses(losses, str(lost))
            else:
                actor.update, actor.update_answer = update, answer
                return answer

    def _check_open(self) -> None:
        if not self._open:
            raise RuntimeError(f"pool {self._name!r} is not open: await its start() first")

    def _check_losses(self, losses: int, reason: str, others: int = 0) -> None:
        if not self._open:
            raise self._closed_error()
        if others > _MAX_OTHERS:
            raise WorkerLost(
                f"pool {self._name!r}: one worker after another died during this call, perhaps in a thread of it; "
                f"the last one with {reason}"
            )
        if losses > 1:
            raise WorkerLost(
                f"pool {self._name!r}: two workers died during this call, the last one with {reason.rstrip('.')}. "
                "See Ray's logs of its process (/tmp/ray/session_latest/logs)."
            )

    def _closed_error(self) -> WorkerLost:
        return WorkerLost(f"pool {self._name!r} was closed during this call")

    # -- the life of an actor -------------------------------------------------------------------------------------

    async def _start_actor(self, index: int) -> WorkerActor:
        """Start an actor and its worker, and route calls to it."""
        if self._placement is None:
            raise RuntimeError("the pool is not started")
        actor = self._placement.create(index)
        where = f"worker {index} of pool {self._name!r}"
        try:
            async with asyncio.timeout(self._start_timeout_s) as deadline:
                actor.node = await actor.actor.node.remote()
                update = self._update
                failure, started = unpack(await actor.actor.start.remote(self._packed_build, update))
                self._description, self._calls, answer = started or (None, "", None)
                while failure is None and update is not self._update:  # A newer one was published meanwhile.
                    update = self._update
                    request = pack((0, None, None, unpack(update or b"")))
                    failure, answer = unpack(await actor.apply_update(request))
        except TimeoutError as error:
            actor.discard()
            if not deadline.expired():
                raise
            raise WorkerLost(f"{where} was not ready within {self._start_timeout_s:g} s") from error
        except RayError as error:
            actor.discard()
            raise WorkerLost(f"{where} died before it was ready: {first_line(error)}") from error
        except BaseException:
            actor.discard()
            raise
        if failure is not None:
            actor.discard()
            raise unpack_exception(failure, where)
        actor.update, actor.update_answer = update, answer
        self._router.add(actor)
        watch = asyncio.create_task(self._watch(actor))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return actor

    async def _watch(self, actor: WorkerActor) -> None:
        """Replace an actor as soon as it dies, even while it has no calls."""
        try:
            await actor.actor.wait_for_end.remote()
        except RayError as error:
            self._replace(actor, first_line(error))

    def _replace(self, actor: WorkerActor, reason: str, *, killed: bool = False) -> None:
        """Replace a dead actor, or one that must be killed; the first reason given is kept."""
        if actor.failure is not None or not self._open:
            return
        actor.failure, actor.killed, actor.calls_at_end = reason, killed, actor.load
        self._router.remove(actor)
        actor.kill()
        actor.culprit = asyncio.create_task(find_culprit(actor))
        self._slots[actor.index] = asyncio.create_task(self._start_replacement(actor.index))

    async def _start_replacement(self, index: int) -> WorkerActor:
        pause_s, failures = 0.5, 0
        while True:
            try:
                return await self._start_actor(index)
            except Exception as error:  # noqa: BLE001  Any failure may be temporary: nodes come and go.
                failures += 1
                if failures >= _MAX_FAILURES:
                    self._router.mark_down(f"pool {self._name!r} has no worker left: {error}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
