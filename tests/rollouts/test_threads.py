"""Threads for what cannot be awaited."""

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


def run(story, *, most=2):
    async def main():
        pool = Threads("test-threads", max_threads=most)
        try:
            return await asyncio.wait_for(story(pool), 20)
        finally:
            pool.close()

    return asyncio.run(main())


async def given_up(pool, work):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await pool.run(work)


def test_calls_run_off_the_event_loop_and_come_back():
    async def story(pool):
        found = await asyncio.gather(*(pool.run(lambda n=n: (n, threading.current_thread().name)) for n in range(50)))
        assert found == [(n, "test-threads") for n in range(50)]

    run(story)


def test_no_more_run_at_a_time_than_there_are_places():
    running, most, lock = 0, 0, threading.Lock()

    def work():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.005)
        with lock:
            running -= 1

    async def story(pool):
        await asyncio.gather(*(pool.run(work) for _ in range(20)))

    run(story, most=3)
    assert most == 3


@pytest.mark.parametrize("error", [KeyError("x"), TimeoutError("mine")])
def test_exceptions_arrive_as_themselves(error):
    def work():
        raise error

    async def story(pool):
        with pytest.raises(type(error)) as raised:
            await pool.run(work)
        assert raised.value is error

    run(story)


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration()])
def test_what_would_end_the_event_loop_is_a_failure_of_the_call(error):
    def work():
        raise error

    async def story(pool):
        with pytest.raises(RuntimeError, match=f"the call raised {type(error).__name__}"):
            await pool.run(work)

    run(story)


def test_a_call_that_hangs_gives_its_place_to_the_next(gate):
    async def story(pool):
        for _ in range(3):
            await given_up(pool, gate.wait)
            assert await pool.run(lambda: "next") == "next"

    run(story, most=1)


def test_a_call_that_was_given_up_while_it_waited_is_not_made(gate):
    made = []

    async def story(pool):
        first = asyncio.ensure_future(pool.run(gate.wait))
        await asyncio.sleep(0)
        await given_up(pool, lambda: made.append(1))
        gate.set()
        await first
        assert await pool.run(lambda: "next") == "next"

    run(story, most=1)
    assert made == []


def test_when_too_many_never_return_no_more_are_made_until_some_do(gate, monkeypatch):
    monkeypatch.setattr(threads, "MAX_HANGING_CALLS", 2)

    async def story(pool):
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

    assert run(story) == 1


def test_an_event_loop_that_ended_meanwhile_is_left_in_peace(gate):
    async def story(pool):
        await given_up(pool, gate.wait)

    run(story)
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "test-threads":
            thread.join(5)


def test_closing_lets_the_threads_go():
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
