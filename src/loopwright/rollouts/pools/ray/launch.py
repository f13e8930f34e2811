"""Checks requests against the cluster, and reserves resources as a placement group."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from loopwright.rollouts.pools.resources import (
    ROUNDING,
    ClusterNode,
    ResourceRequest,
    ResourcesError,
    find_shortage,
    format_resources,
    placement_error,
)

log = logging.getLogger(__name__)
PLACEMENT_TIMEOUT_S = 60.0
"""How long to wait for resources that others hold."""
_WARNING_S = 5.0
"""After how long a wait for resources is reported."""
_POLL_S = 0.05


def cluster_nodes() -> list[ClusterNode]:
    """The machines that are alive, and what is free on each."""
    free = _free_resources()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [
        ClusterNode(node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in nodes
        if node["Alive"]
    ]


def _free_resources() -> dict[str, dict[str, float]]:
    free: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return free


def check_resources(requests: Sequence[ResourceRequest]) -> None:
    """ResourcesError if the cluster could not hold the requests even while idle, or lacks a group that they name."""
    for request in requests:
        if request.group is not None:
            check_group(request, find_group(request.group))
    nodes, created = cluster_nodes(), [request for request in requests if request.group is None]
    if created and (shortage := find_shortage(created, nodes)):
        raise placement_error(created, nodes, shortage)


def find_group(name: str) -> PlacementGroup:
    """The placement group of this name, whoever created it. ResourcesError if there is none, or several."""
    groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
    matches = [group for group in groups if group["name"] == name]
    if len(matches) != 1:
        names = ", ".join(sorted({repr(group["name"]) for group in groups if group["name"]})) or "none"
        count = f"{len(matches)} placement groups are" if matches else "no placement group is"
        raise ResourcesError(
            f"{count} named {name!r} on the Ray cluster (named groups: {names}). Create it first: "
            f'ray.util.placement_group(bundles, name="{name}", lifetime="detached").'
        )
    (match,) = matches
    bundles = [match["bundles"][index] for index in sorted(match["bundles"])]
    return PlacementGroup(PlacementGroupID.from_hex(match["placement_group_id"]), bundles)


def check_group(request: ResourceRequest, group: PlacementGroup) -> None:
    """ResourcesError if a bundle that a pool should use is missing or too small."""
    bundles, start_bundle = group.bundle_specs, request.start_bundle
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
                f"{format_resources({kind: bundle.get(kind, 0) for kind in request.bundle})}. "
                "Make its bundles as large as the workers."
            )


async def reserve(request: ResourceRequest, *, timeout_s: float = PLACEMENT_TIMEOUT_S) -> PlacementGroup:
    """A new placement group with a bundle for every worker; ResourcesError if its resources are not free in time."""
    check_resources([request])
    group: PlacementGroup = placement_group([request.bundle] * request.workers, strategy=request.strategy)
    try:
        await wait_until_placed(group, request, timeout_s=timeout_s)
    except BaseException:
        release(group)
        raise
    return group


def release(group: PlacementGroup) -> None:
    """Return the resources of a group; actors that still run in it die."""
    if ray.is_initialized():
        with suppress(Exception):
            remove_placement_group(group)


async def wait_until_placed(
    group: PlacementGroup, request: ResourceRequest, *, timeout_s: float = PLACEMENT_TIMEOUT_S
) -> None:
    """Wait until a group has its resources; ResourcesError if that takes too long."""
    loop = asyncio.get_running_loop()
    start, warned = loop.time(), False
    while (state := (table := placement_group_table(group)).get("state")) != "CREATED":
        if state == "REMOVED":
            raise ResourcesError(f"{request}, but the placement group was removed. Create a new one.")
        waited_s, status = loop.time() - start, table.get("stats", {}).get("scheduling_state", state)
        if waited_s > timeout_s:
            reason = f"other processes hold the resources, and did not release them within {timeout_s:g} s"
            raise placement_error([request], cluster_nodes(), f"{reason} (Ray says {status})")
        if waited_s > _WARNING_S and not warned:
            warned = True
            error = placement_error([request], cluster_nodes(), f"not free yet, Ray says {status}")
            log.warning("waiting up to %g s: %s", timeout_s, error)
        await asyncio.sleep(_POLL_S)


async def wait_until_vacant(
    request: ResourceRequest, group: PlacementGroup, *, timeout_s: float = PLACEMENT_TIMEOUT_S
) -> None:
    """Wait until nobody else uses the bundles that a pool should use; ResourcesError if that takes too long."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        free = {kind: amount for node in _free_resources().values() for kind, amount in node.items()}
        occupied = [
            f"bundle {index} has {free.get(name, 0.0):g} {kind} free"
            for index in range(request.start_bundle, request.start_bundle + request.workers)
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
