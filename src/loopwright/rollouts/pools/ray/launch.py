"""Checks requests against the cluster, and reserves resources as a placement group."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from loopwright.rollouts.pools.resources import (
    ROUNDING,
    ClusterNode,
    ResourceRequest,
    ResourcesError,
    Strategy,
    find_shortage,
    format_resources,
    placement_error,
)

PLACEMENT_TIMEOUT_S = 10.0
"""How long to wait for resources that others hold."""
_POLL_S = 0.05


def cluster_nodes() -> list[ClusterNode]:
    """The machines that are alive, and what is free on each."""
    free = _free_resources()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [
        ClusterNode(
            name=node["NodeManagerAddress"],
            cpus=node["Resources"].get("CPU", 0.0),
            memory_bytes=node["Resources"].get("memory", 0.0),
            free_cpus=free.get(node["NodeID"], {}).get("CPU", 0.0),
            free_memory_bytes=free.get(node["NodeID"], {}).get("memory", 0.0),
        )
        for node in nodes
        if node["Alive"]
    ]


def _free_resources() -> dict[str, dict[str, float]]:
    free: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return free


def check_resources(requests: Sequence[ResourceRequest], strategy: Strategy = "PACK") -> None:
    """ResourcesError if the cluster could not hold the requests even while idle."""
    nodes = cluster_nodes()
    if shortage := find_shortage(requests, nodes, strategy):
        raise placement_error(requests, nodes, shortage)


def check_group(request: ResourceRequest, group: PlacementGroup, start_bundle: int = 0) -> None:
    """ResourcesError if a bundle that a pool should use is missing or too small."""
    bundles = group.bundle_specs
    last = start_bundle + request.workers - 1
    if start_bundle < 0 or last >= len(bundles):
        raise ResourcesError(
            f"{request}, starting at bundle {start_bundle}, but the placement group has {len(bundles)} bundles. "
            "Give it more, or start at an earlier one."
        )
    for index in range(start_bundle, last + 1):
        bundle = bundles[index]
        if any(bundle.get(kind, 0) + ROUNDING < needed for kind, needed in request.bundle.items()):
            raise ResourcesError(
                f"{request}, but bundle {index} of the placement group has only "
                f"{format_resources(bundle.get('CPU', 0), bundle.get('memory', 0))}. "
                "Make its bundles as large as the workers."
            )


class Reservation:
    """A placement group with a bundle for every worker, in the order of the requests."""

    def __init__(self, group: PlacementGroup, requests: Sequence[ResourceRequest]) -> None:
        self.group = group
        self.start: dict[str, int] = {}
        """The first bundle of each pool, by name."""
        bundle = 0
        for request in requests:
            self.start[request.name] = bundle
            bundle += request.workers

    def release(self) -> None:
        """Return the resources; actors that still run in the group die."""
        if ray.is_initialized():
            with suppress(Exception):
                remove_placement_group(self.group)


async def reserve(
    requests: Sequence[ResourceRequest], *, strategy: Strategy = "PACK", timeout_s: float = PLACEMENT_TIMEOUT_S
) -> Reservation:
    """Reserve resources for these pools in one placement group; ResourcesError if they are not free in time."""
    check_resources(requests, strategy)
    bundles = [request.bundle for request in requests for _ in range(request.workers)]
    reservation = Reservation(placement_group(bundles, strategy=strategy), requests)
    try:
        await wait_until_placed(reservation.group, requests, timeout_s=timeout_s)
    except BaseException:
        reservation.release()
        raise
    return reservation


async def wait_until_placed(
    group: PlacementGroup, requests: Sequence[ResourceRequest], *, timeout_s: float = PLACEMENT_TIMEOUT_S
) -> None:
    """Wait until a group has its resources; ResourcesError if that takes too long."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while (state := placement_group_table(group).get("state")) != "CREATED":
        if state == "REMOVED":
            summary = "; ".join(map(str, requests))
            raise ResourcesError(f"{summary}, but the placement group was removed. Create a new one.")
        if loop.time() > deadline:
            reason = f"other processes hold the resources, and did not release them within {timeout_s:g} s"
            raise placement_error(requests, cluster_nodes(), reason)
        await asyncio.sleep(_POLL_S)


async def wait_until_vacant(
    request: ResourceRequest, group: PlacementGroup, start_bundle: int, *, timeout_s: float = PLACEMENT_TIMEOUT_S
) -> None:
    """Wait until nobody else uses the bundles that a pool should use; ResourcesError if that takes too long."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        free = {kind: amount for node in _free_resources().values() for kind, amount in node.items()}
        occupied = [
            f"bundle {index} has {free.get(name, 0.0):g} {kind} free"
            for index in range(start_bundle, start_bundle + request.workers)
            for kind, needed in request.bundle.items()
            if free.get(name := f"{kind}_group_{index}_{group.id.hex()}", 0.0) + ROUNDING < needed
        ]
        if not occupied:
            return
        if loop.time() > deadline:
            raise ResourcesError(
                f"{request}, but the placement group's bundles are in use: {', '.join(occupied)}. "
                "Start at another bundle, or stop what runs there."
            )
        await asyncio.sleep(_POLL_S)
