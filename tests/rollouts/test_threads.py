"""Threads for blocking calls."""

import asyncio
import threading

import pytest

from loopwright.rollouts import threads
from loopwright.rollouts.threads import Threads, TooManyHangingCalls


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


def run(body, *, most=2):
    async def main():
        pool = Threads("test-threads", max_threads=most)
        try:
            return await asyncio.wait_for(body(pool), 20)
        finally:
            pool.close()

    return asyncio.run(main())


async def given_up(pool, work):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await pool.run(work)


def test_calls_run_off_the_event_loop_and_return():
    async def body(pool):
        results = await asyncio.gather(*(pool.run(lambda n=n: (n, threading.current_thread().name)) for n in range(50)))
        assert results == [(n, "test-threads") for n in range(50)]

    run(body)


def test_concurrent_calls_are_limited():
    running, most, lock = 0, 0, threading.Lock()

    def work():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.005)
        with lock:
            running -= 1

    async def body(pool):
        await asyncio.gather(*(pool.run(work) for _ in range(20)))

    run(body, most=3)
    assert most == 3


@pytest.mark.parametrize("error", [KeyError("x"), TimeoutError("mine")])
def test_exceptions_are_raised_to_the_caller(error):
    def work():
        raise error

    async def body(pool):
        with pytest.raises(type(error)) as raised:
            await pool.run(work)
        assert raised.value is error

    run(body)


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration()])
def test_exceptions_that_would_end_the_event_loop_fail_only_the_call(error):
    def work():
        raise error

    async def body(pool):
        with pytest.raises(RuntimeError, match=f"the call raised {type(error).__name__}"):
            await pool.run(work)

    run(body)


def test_a_hanging_call_gives_its_slot_to_the_next(gate):
    async def body(pool):
        for _ in range(3):
            await given_up(pool, gate.wait)
            assert await pool.run(lambda: "next") == "next"

    run(body, most=1)


def test_a_call_cancelled_while_waiting_is_not_made(gate):
    calls = []

    async def body(pool):
        first = asyncio.ensure_future(pool.run(gate.wait))
        await asyncio.sleep(0)
        await given_up(pool, lambda: calls.append(1))
        gate.set()
        await first
        assert await pool.run(lambda: "next") == "next"

    run(body, most=1)
    assert calls == []


def test_with_too_many_hanging_calls_no_more_are_made_until_some_return(gate, monkeypatch):
    monkeypatch.setattr(threads, "MAX_HANGING_CALLS", 2)

    async def body(pool):
        for _ in range(2):
            await given_up(pool, gate.wait)
        with pytest.raises(TooManyHangingCalls, match="2 calls never returned"):
            await pool.run(lambda: 1)
        gate.set()
        while True:
            try:
                return await pool.run(lambda: 1)
            except TooManyHangingCalls:
                await asyncio.sleep(0.001)

    assert run(body) == 1


def test_a_result_for_a_closed_event_loop_is_dropped(gate):
    async def body(pool):
        await given_up(pool, gate.wait)

    run(body)
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "test-threads":
            thread.join(5)


def test_closing_ends_the_threads():
    async def main():
        pool = Threads("closing-threads")
        await asyncio.gather(*(pool.run(lambda: None) for _ in range(5)))
        pool.close()
        pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            await pool.run(lambda: None)

    asyncio.run(main())
    for thread in threading.enumerate():
        if thread.name == "closing-threads":
            thread.join(5)
            assert not thread.is_alive()
