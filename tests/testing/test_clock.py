"""Simulated time: nothing but timers makes it pass, and it never waits."""

import asyncio
import threading
import time

from loopwright.testing import simulate


def test_time_jumps_to_the_next_timer():
    async def main():
        clock, seen = asyncio.get_running_loop().time, []

        async def sleep(seconds):
            await asyncio.sleep(seconds)
            seen.append(clock())

        await asyncio.gather(sleep(86_400.0 * 30), sleep(5.0), sleep(0.1))
        return seen

    begun = time.perf_counter()
    assert simulate(main()) == [0.1, 5.0, 2_592_000.0]
    assert time.perf_counter() - begun < 1


def test_a_timer_that_was_cancelled_is_not_waited_for():
    async def main():
        async with asyncio.timeout(600):
            await asyncio.sleep(0)
        await asyncio.sleep(700)
        return asyncio.get_running_loop().time()

    begun = time.perf_counter()
    assert simulate(main()) == 700.0
    assert time.perf_counter() - begun < 1


def test_a_thread_is_waited_for_where_no_timer_is_set():
    async def main():
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        threading.Timer(0.05, lambda: loop.call_soon_threadsafe(done.set_result, 7)).start()
        return await done, loop.time()

    assert simulate(main()) == (7, 0.0)
