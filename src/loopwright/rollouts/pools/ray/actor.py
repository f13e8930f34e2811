"""One Ray actor as a pool sees it: started, called, and killed."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from loopwright.rollouts.pools.actor_host import ActorHost, mark_file, read_mark
from loopwright.rollouts.pools.resources import ResourceRequest
from loopwright.rollouts.pools.router import RoutedWorker

_CONTROL_CALLS = 64
"""How many of an actor's methods may run besides its calls: updates, the death watch, its end."""
Method = Callable[[bytes], Any]
"""A method of an actor: takes packed data and returns the reference to an answer."""


class RayActorHost(ActorHost):
    """A host that knows its node."""

    async def node(self) -> str:
        """The node that this actor runs on."""
        return current_node_id()


_Actor: Any = ray.remote(RayActorHost)
_read_mark: Any = ray.remote(num_cpus=0, max_retries=0)(read_mark)
_READ_MARK_S = 10.0


class Deadline(NamedTuple):
    """When a call must be answered, and how long it was given."""

    at: float | None
    timeout_s: float | None

    @classmethod
    def after(cls, timeout_s: float | None) -> "Deadline":
        """This many seconds from now, by the event loop's clock."""
        return cls(None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s, timeout_s)

    def left_s(self) -> float | None:
        """The remaining seconds."""
        return None if self.at is None else max(0.0, self.at - asyncio.get_running_loop().time())


class WorkerActor(RoutedWorker):
    """An actor with a worker in it."""

    def __init__(self, index: int, actor: Any, mark_name: str) -> None:
        super().__init__()
        self.index, self.actor, self.mark_name = index, actor, mark_name
        # Looked up once: a handle creates a new method object at each access.
        self.handle: Method = actor.handle.remote
        self.apply_update: Method = actor.apply_update.remote
        self.failure: str | None = None
        """Why it cannot be used any more."""
        self.calls_at_end = 0
        """How many calls it had then."""
        self.killed = False
        """Whether the pool ended it."""
        self.culprit: asyncio.Task[int] | None = None
        """Finds out which call it died of."""
        self.update: bytes | None = None
        """The latest update that it applied."""
        self.update_answer: Any = None
        """Its answer to that update."""

    def kill(self) -> None:
        """End its process at once."""
        with suppress(Exception):
            ray.kill(self.actor)

    def discard(self) -> None:
        """End it, whatever it does; nobody asks which call that is."""
        self.kill()
        if self.node in ("", current_node_id()):
            mark_file(self.mark_name).unlink(missing_ok=True)


class ActorLost(Exception):
    """The actor of a call is gone."""

    def __init__(self, actor: WorkerActor) -> None:
        super().__init__(actor.failure)
        self.node, self.actor = actor.node, actor

    async def culprit(self) -> int | None:
        """The call whose code ran when the actor died; 0 if unknown, None if none did and the pool killed it."""
        number = 0 if self.actor.culprit is None else await asyncio.shield(self.actor.culprit)
        return number or (None if self.actor.killed else 0)


@dataclass(frozen=True)
class ActorPlacement:
    """Where the actors of a pool run: the bundles of a placement group, and what can be imported there."""

    request: ResourceRequest
    group: PlacementGroup
    max_concurrency: int
    path: tuple[str, ...]
    actor_name: str | None = None
    """Prefix of the actors' names, to which each adds its index; other processes find them by name."""

    def create(self, index: int) -> WorkerActor:
        """A new actor in the bundle of this index; its worker is not built yet."""
        bundle = PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=self.request.start_bundle + index
        )
        options = _Actor.options(
            num_cpus=self.request.cpus,
            num_gpus=self.request.gpus,
            memory=self.request.memory_bytes,
            resources=dict(self.request.resources),
            max_concurrency=self.max_concurrency + _CONTROL_CALLS,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=bundle,
            name=None if self.actor_name is None else f"{self.actor_name}-{index}",
        )
        mark_name = uuid4().hex
        return WorkerActor(index, options.remote(list(self.path), mark_name), mark_name)


def wait_for(ref: Any) -> asyncio.Task[None]:
    """A task that waits for a reference and ignores its exceptions."""

    async def wait() -> None:
        with suppress(Exception):
            await ref

    return asyncio.ensure_future(wait())


async def find_culprit(actor: WorkerActor) -> int:
    """The number of the call whose code ran when the actor died; 0 if none did, or if its machine is gone too."""
    if actor.node == current_node_id():
        return read_mark(actor.mark_name)
    on_its_node = NodeAffinitySchedulingStrategy(actor.node, soft=False)
    try:
        async with asyncio.timeout(_READ_MARK_S):
            return int(await _read_mark.options(scheduling_strategy=on_its_node).remote(actor.mark_name))
    except (RayError, TimeoutError):
        return 0


def current_node_id() -> str:
    """The node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def first_line(error: Exception) -> str:
    """The first line of an error; Ray's errors have many, and the first says what happened."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
