"""One Ray actor as a pool knows it: made, asked, and killed."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from loopwright.rollouts.pools.actor_host import ActorHost
from loopwright.rollouts.pools.resources import ResourceRequest
from loopwright.rollouts.pools.router import Backend

_CONTROL = 64
"""How many of an actor's methods may run besides its calls: updates, the watch over it, its end."""


Method = Callable[[bytes], Any]
"""A method of an actor: takes a parcel and returns the reference to one."""


class RayActorHost(ActorHost):
    """A host that knows where it is."""

    async def node(self) -> str:
        """The node that this actor is on."""
        return own_node()


_Actor: Any = ray.remote(RayActorHost)


class Deadline(NamedTuple):
    """Until when a call has to be answered, and how long it was given."""

    at: float | None
    timeout_s: float | None

    @classmethod
    def after(cls, timeout_s: float | None) -> "Deadline":
        """So many seconds from now, by the event loop's clock."""
        return cls(None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s, timeout_s)

    def left_s(self) -> float | None:
        """What is left of it."""
        return None if self.at is None else max(0.0, self.at - asyncio.get_running_loop().time())


class ActorLost(Exception):
    """A call's worker is gone."""

    def __init__(self, member: "WorkerActor") -> None:
        super().__init__(member.lost)
        self.node = member.node
        self.blamed = not member.killed
        """Whether it died by itself, and was not killed for another call's sake."""


class WorkerActor(Backend):
    """An actor with a worker in it."""

    def __init__(self, index: int, actor: Any) -> None:
        self.index, self.actor = index, actor
        # Looked up once: a handle makes a new method object at each access.
        self.handle: Method = actor.handle.remote
        self.apply_update: Method = actor.apply_update.remote
        self.lost: str | None = None
        """Why it is of no use any more."""
        self.killed = False
        self.update: bytes | None = None
        """What it was told last, and what it answered."""
        self.told: Any = None

    def kill(self) -> None:
        """End its process at once."""
        with suppress(Exception):
            ray.kill(self.actor)


@dataclass(frozen=True)
class ActorPlacement:
    """Where the actors of a pool go: which bundles of which placement group, and what is importable there."""

    ask: ResourceRequest
    group: PlacementGroup
    start_bundle: int
    max_concurrency: int
    path: tuple[str, ...]
    named: str | None = None
    """What its actors are called, each with its number; others on the cluster find them by that."""

    def member(self, index: int) -> WorkerActor:
        """A new actor in the bundle of this number; it has no worker yet."""
        bundle = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.start_bundle + index)
        options = _Actor.options(
            num_cpus=self.ask.cpus,
            memory=self.ask.memory_bytes,
            max_concurrency=self.max_concurrency + _CONTROL,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=bundle,
            name=None if self.named is None else f"{self.named}-{index}",
        )
        return WorkerActor(index, options.remote(list(self.path)))


def awaited(ref: Any) -> asyncio.Task[None]:
    """A reference to be waited for, however it ends."""

    async def wait() -> None:
        with suppress(Exception):
            await ref

    return asyncio.ensure_future(wait())


def own_node() -> str:
    """The node that this process is on."""
    return str(ray.get_runtime_context().get_node_id())


def brief(error: Exception) -> str:
    """Ray's errors run over many lines; the first says it."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
