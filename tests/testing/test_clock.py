"""Simulated time: only timers advance it, and nothing waits."""

import asyncio
import threading
import time

from loopwright.testing import simulate


def test_time_jumps_to_the_next_timer():
    async def main():
        clock, times = asyncio.get_running_loop().time, []

        async def sleep(seconds):
            await asyncio.sleep(seconds)
            times.append(clock())

        await asyncio.gather(sleep(86_400.0 * 30), sleep(5.0), sleep(0.1))
        return times

    start_s = time.perf_counter()
    assert simulate(main()) == [0.1, 5.0, 2_592_000.0]
    assert time.perf_counter() - start_s < 1


def test_a_cancelled_timer_is_ignored():
    async def main():
        async with asyncio.timeout(600):
            await asyncio.sleep(0)
        await asyncio.sleep(700)
        return asyncio.get_running_loop().time()

    start_s = time.perf_counter()
    assert simulate(main()) == 700.0
    assert time.perf_counter() - start_s < 1


def test_threads_are_awaited_if_no_timer_is_set():
    async def main():
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        threading.Timer(0.05, lambda: loop.call_soon_threadsafe(done.set_result, 7)).start()
        return await done, loop.time()

    assert simulate(main()) == (7, 0.0)
