"""The launcher: connects to Ray, checks what is asked for against the cluster, and reserves it as a placement group."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import ray
from ray._private import ray_constants, services
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from loopwright.rollouts.pools.resources import (
    ClusterNode,
    ResourceRequest,
    ResourcesError,
    Strategy,
    find_shortage,
    format_resources,
    placement_error,
)

PLACE_TIMEOUT_S = 10.0
"""How long to wait for resources that others hold."""
_POLL_S = 0.05
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


class RayConnection:
    """Ray, for as long as somebody uses it. Whoever began it ends it, once its last user is gone."""

    _users = 0
    _ours = False

    def __init__(self, cpus: int | None = None) -> None:
        self._open = True
        if not ray.is_initialized():
            _init(cpus)
            RayConnection._ours, RayConnection._users = True, 0
        RayConnection._users += 1

    def close(self) -> None:
        """Let go of Ray."""
        if not self._open:
            return
        self._open = False
        RayConnection._users -= 1
        if RayConnection._users == 0 and RayConnection._ours:
            RayConnection._ours = False
            ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _init(cpus: int | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    existing = os.environ.get("RAY_ADDRESS") or services.find_bootstrap_address(None)
    main = threading.current_thread() is threading.main_thread()
    ours = signal.getsignal(signal.SIGTERM) if main else None
    try:
        if existing and existing != "local":
            ray.init(**quiet)
        else:
            with _loopback():
                ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        place = existing or "this machine"
        raise ResourcesError(f"cannot use Ray at {place}: {error}. Check RAY_ADDRESS and `ray status`") from error
    finally:
        if ours is not None:
            signal.signal(signal.SIGTERM, ours)  # Ray sets its own, and would end us without our saving anything.


@contextmanager
def _loopback() -> Iterator[None]:
    """Have a cluster of one machine listen at 127.0.0.1 alone, as Ray itself does on macOS."""
    before, flag = os.environ.get(_LOOPBACK), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[_LOOPBACK], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = flag
        if before is None:
            del os.environ[_LOOPBACK]
        else:
            os.environ[_LOOPBACK] = before


def cluster_nodes() -> list[ClusterNode]:
    """The machines that are alive, and what is free on each."""
    free = _free()
    there: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [
        ClusterNode(
            name=node["NodeManagerAddress"],
            cpus=node["Resources"].get("CPU", 0.0),
            memory_bytes=node["Resources"].get("memory", 0.0),
            free_cpus=free.get(node["NodeID"], {}).get("CPU", 0.0),
            free_memory_bytes=free.get(node["NodeID"], {}).get("memory", 0.0),
        )
        for node in there
        if node["Alive"]
    ]


def _free() -> dict[str, dict[str, float]]:
    free: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return free


def check(requests: Sequence[ResourceRequest], strategy: Strategy = "PACK") -> None:
    """Raise ResourcesError if the cluster could not hold these even if it were idle."""
    there = cluster_nodes()
    if why := find_shortage(requests, there, strategy):
        raise placement_error(requests, there, why)


def check_group(ask: ResourceRequest, group: PlacementGroup, start_bundle: int = 0) -> None:
    """Raise ResourcesError if a bundle that a pool is to use is not there, or too small."""
    bundles = group.bundle_specs
    last = start_bundle + ask.workers - 1
    if start_bundle < 0 or last >= len(bundles):
        raise ResourcesError(
            f"{ask}, from bundle {start_bundle} on, but the placement group has {len(bundles)} bundles. "
            "Give it more, or start at an earlier one."
        )
    for index in range(start_bundle, last + 1):
        bundle = bundles[index]
        if any(bundle.get(kind, 0) + 1e-6 < wanted for kind, wanted in ask.bundle.items()):
            raise ResourcesError(
                f"{ask}, but bundle {index} of the placement group has only "
                f"{format_resources(bundle.get('CPU', 0), bundle.get('memory', 0))}. "
                f"Make its bundles as large as the workers."
            )


class Reservation:
    """A placement group with a bundle for every worker: those of the first pool first."""

    def __init__(self, group: PlacementGroup, requests: Sequence[ResourceRequest]) -> None:
        self.group = group
        self.start: dict[str, int] = {}
        """The first bundle of each pool, by name."""
        bundle = 0
        for ask in requests:
            self.start[ask.name] = bundle
            bundle += ask.workers

    def release(self) -> None:
        """Give the resources back; actors that still are in the group die."""
        if ray.is_initialized():
            with suppress(Exception):
                remove_placement_group(self.group)


async def reserve(
    requests: Sequence[ResourceRequest], *, strategy: Strategy = "PACK", timeout_s: float = PLACE_TIMEOUT_S
) -> Reservation:
    """Resources for these pools, in one placement group; ResourcesError if they are not there in time."""
    check(requests, strategy)
    group = placement_group([ask.bundle for ask in requests for _ in range(ask.workers)], strategy=strategy)
    reservation = Reservation(group, requests)
    try:
        await placed(group, requests, timeout_s=timeout_s)
    except BaseException:
        reservation.release()
        raise
    return reservation


async def placed(
    group: PlacementGroup, requests: Sequence[ResourceRequest], *, timeout_s: float = PLACE_TIMEOUT_S
) -> None:
    """Wait until a group holds its resources; ResourcesError if that takes too long."""
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    while (state := placement_group_table(group).get("state")) != "CREATED":
        if state == "REMOVED":
            raise ResourcesError(
                f"{'; '.join(map(str, requests))}, but the placement group was removed. Make a new one."
            )
        if loop.time() > until:
            raise placement_error(
                requests, cluster_nodes(), f"others hold what they need, and still did after {timeout_s:g} s"
            )
        await asyncio.sleep(_POLL_S)


async def vacant(
    ask: ResourceRequest, group: PlacementGroup, start_bundle: int, *, timeout_s: float = PLACE_TIMEOUT_S
) -> None:
    """Wait until the bundles that a pool is to use are not in somebody else's use."""
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    bundles = range(start_bundle, start_bundle + ask.workers)
    while True:
        free = {kind: left for node in _free().values() for kind, left in node.items()}
        taken = [
            f"bundle {index} has {free.get(name, 0.0):g} {kind} free"
            for index in bundles
            for kind, wanted in ask.bundle.items()
            if free.get(name := f"{kind}_group_{index}_{group.id.hex()}", 0.0) + 1e-6 < wanted
        ]
        if not taken:
            return
        if loop.time() > until:
            raise ResourcesError(
                f"{ask}, but the placement group's bundles are in use: {', '.join(taken)}. "
                "Start at another bundle, or end what runs there."
            )
        await asyncio.sleep(_POLL_S)
