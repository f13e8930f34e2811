"""Several pools as one: each request goes to the pool of its loop."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from loopwright.rollouts.pools.base import Pool


class NamedPools(Pool):
    """The pools of a run's loops. A request says by `loop` which one it is for; updates reach all of them."""

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self._by_name = pools
        self._pools = list(dict.fromkeys(pools.values()))

    async def start(self) -> None:
        async with AsyncExitStack() as undo:
            for pool in self._pools:
                await pool.start()
                undo.push_async_callback(pool.close)
            undo.pop_all()

    async def call(self, request: Any, *, timeout_s: float | None = None) -> Any:
        return await self._by_name[request.loop].call(request, timeout_s=timeout_s)

    async def publish(self, update: Any, *, timeout_s: float | None = None) -> list[Any]:
        answers = await asyncio.gather(*(pool.publish(update, timeout_s=timeout_s) for pool in self._pools))
        return [answer for each in answers for answer in each]

    @property
    def in_flight(self) -> int:
        return sum(pool.in_flight for pool in self._pools)

    async def close(self) -> None:
        async with AsyncExitStack() as closing:
            for pool in self._pools:
                closing.push_async_callback(pool.close)


def combine_pools(pools: Mapping[str, Pool]) -> Pool:
    """One pool for the loops of these names."""
    distinct = set(pools.values())
    return distinct.pop() if len(distinct) == 1 else NamedPools(pools)
