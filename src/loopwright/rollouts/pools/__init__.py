"""Pools: the same worker in this process, in one Ray actor, or in several behind a router."""

from typing import TYPE_CHECKING

from loopwright.core.imports import lazy_exports
from loopwright.rollouts.pools.base import Pool, PoolDown, StreamingWorker, Worker, WorkerLost
from loopwright.rollouts.pools.local import LocalPool
from loopwright.rollouts.pools.resources import PlacementConfig, ResourcesError

if TYPE_CHECKING:
    from loopwright.rollouts.pools.ray.pool import RayPool

__all__ = [
    "LocalPool",
    "PlacementConfig",
    "Pool",
    "PoolDown",
    "RayPool",
    "ResourcesError",
    "StreamingWorker",
    "Worker",
    "WorkerLost",
]

__getattr__ = lazy_exports(__name__)
