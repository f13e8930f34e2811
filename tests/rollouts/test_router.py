"""The router: the least loaded first, in order when all are full, and no call kept waiting for nothing."""

import asyncio

import pytest

from loopwright.rollouts.pools.base import WorkerLost
from loopwright.rollouts.pools.router import Backend, Router


def seated(count, capacity=10, nodes=""):
    router, seats = Router(capacity), [Backend() for _ in range(count)]
    for seat, node in zip(seats, nodes or " " * count, strict=True):
        seat.node = node
        router.join(seat)
    return router, seats


def test_calls_go_to_the_least_loaded_and_in_turns_when_all_are_equal():
    async def story():
        router, seats = seated(3)
        taken = [await router.take() for _ in range(6)]
        assert [seat.load for seat in seats] == [2, 2, 2]
        router.give_back(taken[4])
        assert await router.take() is taken[4]
        alone, three = seated(3)
        for _ in range(6):
            alone.give_back(await alone.take())
        assert [seat.served for seat in three] == [2, 2, 2]

    asyncio.run(story())


def test_calls_wait_in_order_and_a_cancelled_one_keeps_no_seat():
    async def story():
        router, (seat,) = seated(1, capacity=1)
        await router.take()
        waiting = [asyncio.ensure_future(router.take()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        router.give_back(seat)
        waiting[1].cancel()  # In the very turn in which it was served.
        await asyncio.gather(*waiting[:2], return_exceptions=True)
        assert await waiting[2] is seat
        assert seat.load == 1

    asyncio.run(story())


def test_another_machine_is_preferred_but_not_waited_for():
    async def story():
        router, seats = seated(3, nodes="aab")
        assert {id(await router.take("a")) for _ in range(4)} == {id(seats[2])}
        router.leave(seats[2])
        assert (await router.take("a")).node == "a"

    asyncio.run(story())


def test_who_waits_in_vain_is_told_until_somebody_joins():
    async def story():
        router = Router(1)
        waiting = asyncio.ensure_future(router.take())
        await asyncio.sleep(0)
        router.give_up("no worker left")
        for call in (waiting, router.take()):
            with pytest.raises(WorkerLost, match="no worker left"):
                await call
        router.join(Backend())
        assert (await router.take()).load == 1

    asyncio.run(story())
