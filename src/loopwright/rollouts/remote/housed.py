"""A pool of remote workers with the gateway that they work through: they come and go together."""

from collections.abc import Awaitable, Callable
from typing import Any

from loopwright.core.errors import sentence
from loopwright.engines.news import News
from loopwright.gateway.client import GatewayLost
from loopwright.gateway.gateway import AdvertiseError
from loopwright.gateway.refusal import Refused
from loopwright.rollouts.pool import Pool, PoolDown, WorkerLost
from loopwright.rollouts.remote.home import Home
from loopwright.rollouts.remote.worker import Order
from loopwright.rollouts.worker import Request

Check = Callable[[str], Awaitable[None]]
"""Whether a gateway at this URL can be worked with from where the agents are; GatewayLost or AdvertiseError if not."""
_MOST_LOST = 8
"""Rollouts in a row that may lose their gateway before it counts as gone."""


class Housed(Pool):
    """Remote workers and their gateway. A rollout whose gateway is lost is lost; when it stays away, all ends."""

    def __init__(self, home: Home, workers: Pool, check: Check | None = None) -> None:
        self._home, self._workers, self._check = home, workers, check
        self._lost = 0

    async def start(self) -> None:
        try:
            await self._home.start()
            if self._check is not None:
                await self._check((await self._home.access()).url)
        except (GatewayLost, AdvertiseError) as error:
            await self._home.aclose()
            raise PoolDown(str(error)) from error
        await self._workers.start()

    async def call(self, request: Request, *, timeout_s: float | None = None) -> Any:
        try:
            answer = await self._workers.call(Order(await self._home.access(), request), timeout_s=timeout_s)
        except GatewayLost as error:
            self._lost += 1
            if self._lost >= _MOST_LOST:
                raise PoolDown(f"{sentence(error)} It was lost {self._lost} times in a row.") from error
            raise WorkerLost(str(error)) from error
        self._lost = 0
        return answer

    async def tell(self, news: News, *, timeout_s: float | None = None) -> list[Any]:
        try:
            return [await self._home.tell(news)]
        except (GatewayLost, Refused) as error:
            raise PoolDown(f"the gateway could not be told of version {news.version}: {error}") from error

    @property
    def in_flight(self) -> int:
        return self._workers.in_flight

    async def close(self) -> None:
        try:
            await self._workers.close()
        finally:
            await self._home.aclose()
