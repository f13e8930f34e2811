"""Pools: dispatch through the router of a pool on Ray, against bare calls of Ray actors that do the same."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import ray

from benchmarks.measure import Ratio, best_of
from loopwright.rollouts.pools.base import Worker
from loopwright.rollouts.pools.ray.launch import RayConnection
from loopwright.rollouts.pools.ray.pool import RayPool

WORKERS, CALLS, CONCURRENCY, ROUNDS = 2, 3_000, 64, 6
REQUEST = {"messages": [{"role": "user", "content": "What is 2 + 3? " * 20}], "label": "5", "seed": 1, "extra": None}
ANSWER = {"ids": list(range(200)), "logprobs": [-0.25] * 200, "reward": 1.0}


class Echo(Worker):
    """Answers at once, with as much as a short episode holds."""

    async def handle(self, request: Any) -> Any:
        return ANSWER


class BareEcho:
    """The same without a pool."""

    async def handle(self, request: Any) -> Any:
        return ANSWER


async def drive(call: Callable[[int], Awaitable[Any]]) -> None:
    numbers = iter(range(CALLS))

    async def work() -> None:
        for number in numbers:
            await call(number)

    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))


def run() -> list[Ratio]:
    """Same request and answer, same number of actors, same concurrency; the pool's calls have a deadline besides."""
    with RayConnection(cpus=WORKERS), asyncio.Runner() as runner:
        kind: Any = ray.remote(BareEcho)
        actors = [kind.options(num_cpus=0.5, max_concurrency=1000).remote() for _ in range(WORKERS)]
        pool = RayPool(Echo, workers=WORKERS, cpus=0.5)
        runner.run(pool.start())

        async def bare(number: int) -> Any:
            return await actors[number % WORKERS].handle.remote(REQUEST)

        async def through_pool(_: int) -> Any:
            return await pool.call(REQUEST, timeout_s=60)

        contenders = {
            "pool": lambda: runner.run(drive(through_pool)),
            "bare": lambda: runner.run(drive(bare)),
        }
        best_of(1, contenders)
        best = best_of(ROUNDS, contenders)
        runner.run(pool.close())
    detail = f"{CALLS / best['pool']:,.0f} calls/s, bare Ray {CALLS / best['bare']:,.0f}"
    name = f"pools: dispatch to {WORKERS} actors against bare Ray calls"
    return [Ratio(name, best["bare"] / best["pool"], 0.7, at_least=True, detail=detail)]
