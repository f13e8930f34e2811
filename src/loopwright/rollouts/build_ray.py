"""The parts of a rollout run that are on Ray: pools of workers, engines that loops share, and gateways."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from loopwright.core.errors import ClusterError, Problem
from loopwright.engines.base import EngineConfig
from loopwright.execution.ray.connection import RayConnection
from loopwright.execution.ray.options import RayOptions
from loopwright.rollouts.engine_pool_ray import EnginePool, EngineWorker, SharedEngineLoops, build_loop_worker
from loopwright.rollouts.pools.actor_host import build_below
from loopwright.rollouts.pools.base import Pool, Worker
from loopwright.rollouts.pools.named import combine_pools
from loopwright.rollouts.pools.ray.launch import check_resources
from loopwright.rollouts.pools.ray.pool import RayPool
from loopwright.rollouts.pools.resources import PlacementConfig, ResourceRequest, ResourcesError
from loopwright.rollouts.remote.gateway_config import RayGatewayConfig
from loopwright.rollouts.remote.gateway_host_ray import RayGatewayHost

_POLL_S = 0.5


class RayBuilder:
    """Builds what runs on Ray. Nodes may have the scenario's directory elsewhere."""

    def __init__(self, options: RayOptions, scenario_dir: Path) -> None:
        self._options, self._scenario_dir = options, scenario_dir

    def pool(self, name: str, build: Callable[..., Worker], config: PlacementConfig, capacity: int) -> Pool:
        """Actors that take up to `capacity` calls at a time."""
        shared = self._shared_options(config.request(name))
        # Calls queue in the caller, where no deadline runs, and not in the pool.
        return RayPool(partial(build_below, build, shared["import_dir"]), **shared, max_concurrency=max(1000, capacity))

    def engines(self, engine: EngineConfig, run: str, placement: PlacementConfig) -> EnginePool:
        """Engines that the loops or the gateways of a run share."""
        return EnginePool(partial(EngineWorker, engine), run, **self._shared_options(placement.request("engines")))

    def loops_with(self, engines: EnginePool, build: Callable[..., Mapping[str, Pool]]) -> dict[str, Pool]:
        """Loops that sample from these engines; `build` makes their pools from what makes a worker."""
        workers = build(partial(build_loop_worker, client=engines.client))
        return dict.fromkeys(workers, SharedEngineLoops(engines, combine_pools(workers)))

    def gateway_host(self, config: RayGatewayConfig, engines: EnginePool) -> RayGatewayHost:
        """Gateways in front of these engines."""
        return RayGatewayHost(config, engines, **self._shared_options(config.request("gateway")))

    @asynccontextmanager
    async def connected(self, requests: Sequence[ResourceRequest]) -> AsyncIterator[None]:
        """Connect to the cluster, and check that all pools fit together before any is launched."""
        options = self._options
        with RayConnection(address=options.address, runtime_env=options.runtime_env):
            # A user who sets `wait_s` expects nodes that are started on demand.
            deadline = time.monotonic() + (options.wait_s if "wait_s" in options.model_fields_set else 0.0)
            while True:
                try:
                    check_resources(requests)
                    break
                except ResourcesError:
                    if time.monotonic() > deadline:
                        raise
                await asyncio.sleep(_POLL_S)
            yield

    def problems(self, requests: Sequence[ResourceRequest]) -> list[Problem]:
        """Why the pools of a run could not be placed on the cluster that is named."""
        try:
            with RayConnection(address=self._options.address, runtime_env=self._options.runtime_env):
                check_resources(requests)
        except ClusterError as error:
            return [Problem("[run.rollout]", str(error))]
        return []

    def _shared_options(self, request: ResourceRequest) -> dict[str, Any]:
        directory = self._options.directory_on_nodes(self._scenario_dir)
        return {"request": request, "import_dir": directory, "wait_s": self._options.wait_s}
