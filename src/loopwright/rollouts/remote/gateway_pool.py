"""A pool of remote workers with the gateway that they work through: they come and go together."""

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
from loopwright.rollouts.remote.gateway_host import GatewayHost
from loopwright.rollouts.remote.worker import RemoteRequest

log = logging.getLogger(__name__)
Check = Callable[[str], Awaitable[None]]
"""Whether a gateway at this URL can be worked with from where the agents are; GatewayLost or AdvertiseError if not."""
_MOST_LOST = 8
"""Rollouts in a row that may lose their gateway before it counts as gone."""


class GatewayPool(Pool):
    """Remote workers and their gateway. A rollout whose gateway is lost is lost; when it stays away, all ends.

    A gateway that was started anew may serve older weights than it was told of. What these have said is lost, too, and
    it is told again.
    """

    def __init__(self, home: GatewayHost, workers: Pool, check: Check | None = None) -> None:
        self._home, self._workers, self._check = home, workers, check
        self._lost = 0
        self._published: WeightUpdate | None = None
        self._publish_lock = asyncio.Lock()

    async def start(self) -> None:
        try:
            await self._home.start()
            if self._check is not None:
                await self._check((await self._home.access()).url)
        except (GatewayLost, AdvertiseError) as error:
            await self._home.aclose()
            raise PoolDown(str(error)) from error
        await self._workers.start()

    async def call(self, request: RolloutRequest, *, timeout_s: float | None = None) -> Any:
        told = self._published
        try:
            answer = await self._workers.call(RemoteRequest(await self._home.access(), request), timeout_s=timeout_s)
        except GatewayLost as error:
            self._lost += 1
            if self._lost >= _MOST_LOST:
                raise PoolDown(f"{sentence(error)} It was lost {self._lost} times in a row.") from error
            raise WorkerLost(str(error)) from error
        self._lost = 0
        if told is not None and (version := _oldest(answer, told.version)) < told.version:
            await self._tell_again(told.version)
            raise WorkerLost(f"it was begun with version {told.version} of the policy, and served by {version}")
        return answer

    async def publish(self, update: WeightUpdate, *, timeout_s: float | None = None) -> list[Any]:
        async with self._publish_lock:
            return [await self._publish(update)]

    async def _publish(self, update: WeightUpdate) -> int:
        known = self._published if self._published is not None and self._published.version == update.version else None
        if known is not None and update.weights is None and not update.paused:
            update = replace(known, paused=False)  # which it does not take twice, unless it was started anew
        try:
            version = await self._home.publish(update)
        except (GatewayLost, Refusal) as error:
            raise PoolDown(f"the gateway could not be told of version {update.version}: {error}") from error
        if isinstance(update.weights, str):  # what lies in a file can be told again
            self._published = update
        elif known is not None:
            self._published = replace(known, paused=update.paused)
        return version

    async def _tell_again(self, version: int) -> None:
        async with self._publish_lock:
            if self._published is not None and self._published.version == version:
                log.warning("the gateway serves older weights than those of version %d: it is told again", version)
                await self._publish(self._published)

    @property
    def description(self) -> Any:
        return self._workers.description

    @property
    def in_flight(self) -> int:
        return self._workers.in_flight

    async def close(self) -> None:
        try:
            await self._workers.close()
        finally:
            await self._home.aclose()


def _oldest(answer: Any, now: int) -> int:
    """The oldest version of the policy that sampled any of it; `now` if none did."""
    nodes = answer.nodes if isinstance(answer, Episode) else ()
    return min((span.version for node in nodes for span in node.spans), default=now)
