"""A pool of remote workers with the gateway that they sample through."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from loopwright.core.episode import Episode
from loopwright.core.errors import sentence
from loopwright.engines.weight_update import WeightUpdate
from loopwright.gateway.client import GatewayLost
from loopwright.gateway.gateway import AdvertiseError
from loopwright.gateway.refusal import Refusal
from loopwright.rollouts.loops.worker import RolloutRequest
from loopwright.rollouts.pools.base import Pool, PoolDown, WorkerLost
from loopwright.rollouts.remote.gateway_host import TRIAL_SERVER_ACCESS, GatewayAccess, GatewayHost
from loopwright.rollouts.remote.worker import RemoteRequest

log = logging.getLogger(__name__)
Probe = Callable[[str], Awaitable[None]]
"""Checks that agents can use a gateway at this URL; raises GatewayLost or AdvertiseError if not."""
_MAX_LOSSES = 8
"""Rollouts in a row that may lose their gateway before the pool is down."""


class GatewayPool(Pool):
    """Remote workers plus the gateway they sample through; both start and stop together.

    A rollout that loses its gateway counts as lost. After eight losses in a row the pool is down.
    If the gateway restarts with older weights, its rollouts are discarded and the current weights are published again.
    Without a `host`, the workers use a trial server's own gateway, whose weights cannot be changed from here.
    """

    def __init__(self, host: GatewayHost | None, workers: Pool, probe: Probe | None = None) -> None:
        self._host, self._workers, self._probe = host, workers, probe
        self._consecutive_losses = 0
        self._published: WeightUpdate | None = None
        self._publish_lock = asyncio.Lock()

    async def start(self) -> None:
        try:
            if self._host is not None:
                await self._host.start()
            if self._probe is not None:
                await self._probe((await self._access()).url)
        except (GatewayLost, AdvertiseError) as error:
            await self._close_host()
            raise PoolDown(str(error)) from error
        await self._workers.start()

    async def call(self, request: RolloutRequest, *, timeout_s: float | None = None) -> Any:
        published = self._published
        try:
            access = await self._access()
            episode = await self._workers.call(RemoteRequest(access, request), timeout_s=timeout_s)
        except GatewayLost as error:
            self._consecutive_losses += 1
            if self._consecutive_losses >= _MAX_LOSSES:
                message = f"{sentence(error)} It was lost {self._consecutive_losses} times in a row."
                raise PoolDown(message) from error
            raise WorkerLost(str(error)) from error
        self._consecutive_losses = 0
        if published is not None and isinstance(episode, Episode):
            oldest = episode.oldest_version
            if oldest is not None and oldest < published.version:
                async with self._publish_lock:
                    if self._published is not None and self._published.version == published.version:
                        log.warning("the gateway serves version %d; publishing %d again", oldest, published.version)
                        await self._publish(self._published)
                raise WorkerLost(
                    f"rollout discarded: started under policy version {published.version}, sampled by version {oldest}"
                )
        return episode

    async def publish(self, update: WeightUpdate, *, timeout_s: float | None = None) -> list[Any]:
        async with self._publish_lock:
            return [await self._publish(update)]

    async def _publish(self, update: WeightUpdate) -> int:
        if self._host is None:
            raise PoolDown('a trial server\'s engine takes no weights from a run: remove [run.gateway] type = "server"')
        current = self._published
        if current is not None and current.version != update.version:
            current = None
        if current is not None and update.weights is None and not update.paused:
            # Engines that have these weights do not load them twice; a restarted gateway does.
            update = replace(current, paused=False)
        try:
            version = await self._host.publish(update)
        except (GatewayLost, Refusal) as error:
            raise PoolDown(f"cannot publish policy version {update.version} to the gateway: {error}") from error
        if isinstance(update.weights, str):  # weights in a file can be published again
            self._published = update
        elif current is not None:
            self._published = replace(current, paused=update.paused)
        return version

    @property
    def in_flight(self) -> int:
        return self._workers.in_flight

    async def close(self) -> None:
        try:
            await self._workers.close()
        finally:
            await self._close_host()

    async def _access(self) -> GatewayAccess:
        return TRIAL_SERVER_ACCESS if self._host is None else await self._host.access()

    async def _close_host(self) -> None:
        if self._host is not None:
            await self._host.aclose()
