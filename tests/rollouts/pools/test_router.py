"""The router: the least loaded worker first, in order when all are full, and no call waits forever."""

import asyncio

import pytest

from loopwright.rollouts.pools.base import WorkerLost
from loopwright.rollouts.pools.router import RoutedWorker, Router


def build_router(count, capacity=10, nodes=""):
    router, backends = Router(capacity), [RoutedWorker() for _ in range(count)]
    for backend, node in zip(backends, nodes or " " * count, strict=True):
        backend.node = node
        router.add(backend)
    return router, backends


def test_calls_go_to_the_least_loaded_and_in_turns_when_all_are_equal():
    async def main():
        router, backends = build_router(3)
        calls = [await router.acquire() for _ in range(6)]
        assert [backend.load for backend in backends] == [2, 2, 2]
        router.release(calls[4])
        assert await router.acquire() is calls[4]
        router, backends = build_router(3)
        for _ in range(6):
            router.release(await router.acquire())
        assert [backend.assigned for backend in backends] == [2, 2, 2]

    asyncio.run(main())


def test_calls_wait_in_order_and_a_cancelled_one_holds_no_worker():
    async def main():
        router, (backend,) = build_router(1, capacity=1)
        await router.acquire()
        waiting = [asyncio.ensure_future(router.acquire()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        router.release(backend)
        waiting[1].cancel()  # In the same turn of the event loop in which it was served.
        await asyncio.gather(*waiting[:2], return_exceptions=True)
        assert await waiting[2] is backend
        assert backend.load == 1

    asyncio.run(main())


def test_another_machine_is_preferred_but_not_waited_for():
    async def main():
        router, backends = build_router(3, nodes="aab")
        assert {id(await router.acquire("a")) for _ in range(4)} == {id(backends[2])}
        router.remove(backends[2])
        assert (await router.acquire("a")).node == "a"

    asyncio.run(main())


def test_a_call_with_a_limit_has_no_more_neighbours_than_that_until_it_ends():
    async def main():
        router, (backend,) = build_router(1)
        first, _ = [await router.acquire() for _ in range(2)]
        quiet = asyncio.ensure_future(router.acquire(limit=2))
        behind = asyncio.ensure_future(router.acquire())
        await asyncio.sleep(0)
        assert backend.load == 2
        router.release(first)
        assert await quiet is backend
        await asyncio.sleep(0)
        assert not behind.done()
        router.release(backend, limit=2)
        assert await behind is backend
        assert (backend.load, backend.limits) == (2, [])

    asyncio.run(main())


def test_calls_behind_a_cancelled_call_with_a_limit_do_not_wait_for_it():
    async def main():
        router, (backend,) = build_router(1)
        await router.acquire()
        alone, behind = (asyncio.ensure_future(router.acquire(limit=limit)) for limit in (1, None))
        await asyncio.sleep(0)
        alone.cancel()
        assert await behind is backend

    asyncio.run(main())


def test_calls_fail_while_the_pool_is_down_until_a_worker_is_added():
    async def main():
        router = Router(1)
        waiting = asyncio.ensure_future(router.acquire())
        await asyncio.sleep(0)
        router.mark_down("no worker left")
        for call in (waiting, router.acquire()):
            with pytest.raises(WorkerLost, match="no worker left"):
                await call
        router.add(RoutedWorker())
        assert (await router.acquire()).load == 1

    asyncio.run(main())
