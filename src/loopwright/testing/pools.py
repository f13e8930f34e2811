"""What every pool promises, as tests: near or far, callers cannot tell.

class TestMine(PoolContract):
    def make_pool(self, build: WorkerFactory) -> Pool:
        return Mine(build)
"""
# ruff: noqa: S101  These are tests, wherever they stand.

import asyncio
import functools
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from loopwright.rollouts.pools.base import Pool, Worker, WorkerFactory, WorkerLost

T = TypeVar("T")
_DEADLINE_S = 60.0


class Trouble(ValueError):
    """An exception whose constructor takes other arguments than it keeps: the usual trap of pickling."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"{what} ({code})")
        self.code = code


class Probe(Worker):
    """Does what its request says: the verb and one argument."""

    def __init__(self, mark: str = "") -> None:
        self.mark = mark
        self.update: Any = None

    async def handle(self, request: Any) -> Any:
        verb, argument = request
        return await getattr(self, verb)(argument)

    async def apply_update(self, update: Any) -> Any:
        if isinstance(update, Exception):
            raise update
        self.update = update
        return f"{self.mark}{update}"

    async def echo(self, argument: Any) -> Any:
        """Give back what came."""
        return argument

    async def heard(self, argument: Any) -> Any:
        """The latest update."""
        return self.update

    async def fail(self, argument: str) -> Any:
        """Raise something: of our own, built in, or what ends more than a call."""
        if argument == "trouble":
            raise Trouble(7, "no luck")
        if argument == "cancelled":
            raise asyncio.CancelledError
        if argument == "exit":
            sys.exit(3)
        if argument == "local":

            class Local(KeyError):
                pass

            raise Local("only here")
        raise TimeoutError("a time-out of its own")

    async def sleep(self, argument: float) -> float:
        """Take a while, and heed cancellation."""
        await asyncio.sleep(argument)
        return argument

    async def tidy(self, argument: str) -> None:
        """Take for ever; when cancelled, write a file."""
        path = Path(argument)
        path.with_suffix(".begun").touch()
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0.05)
            path.touch()  # noqa: ASYNC240  Test code.

    async def stubborn(self, argument: float) -> None:
        """Do not heed cancellation for so many seconds."""
        until_s = time.monotonic() + argument
        while time.monotonic() < until_s:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    async def pid(self, argument: Any) -> int:
        """The process it lives in."""
        return os.getpid()


def refuse() -> Worker:
    """A builder that fails."""
    raise Trouble(5, "no worker today")


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for something to become true."""
    until_s = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < until_s, "it never came"
        await asyncio.sleep(0.01)


class PoolContract(ABC):
    """Subclass it, name the subclass `Test…`, and give it a pool whose grace is about a second."""

    @abstractmethod
    def make_pool(self, build: WorkerFactory) -> Pool:
        """A pool of workers that `build` makes."""

    def use(self, story: Callable[[Pool], Awaitable[T]], build: WorkerFactory = Probe) -> T:
        """Run `story` with a started pool in an event loop, and close it."""

        async def main() -> T:
            pool = self.make_pool(build)
            await pool.start()
            try:
                return await asyncio.wait_for(story(pool), _DEADLINE_S)
            finally:
                await pool.close()
                assert pool.in_flight == 0

        return asyncio.run(main())

    def test_answers_arrive_as_they_were(self) -> None:
        """Values of all kinds, many at a time, each to its own caller."""

        async def story(pool: Pool) -> None:
            assert await pool.call(("echo", {"ids": [1, 2], "blob": b"\0", "none": None})) == {
                "ids": [1, 2],
                "blob": b"\0",
                "none": None,
            }
            assert await asyncio.gather(*(pool.call(("echo", n)) for n in range(200))) == list(range(200))

        self.use(story)

    def test_exceptions_arrive_as_themselves(self) -> None:
        """With their very class, message and attributes; nothing of the transport shows."""

        async def story(pool: Pool) -> None:
            with pytest.raises(Trouble) as caught:
                await pool.call(("fail", "trouble"))
            assert type(caught.value) is Trouble
            assert (str(caught.value), caught.value.code) == ("no luck (7)", 7)
            with pytest.raises(TimeoutError, match="of its own") as late:
                await pool.call(("fail", "late"), timeout_s=30)
            assert type(late.value) is TimeoutError
            with pytest.raises(KeyError, match="only here"):
                await pool.call(("fail", "local"))

        self.use(story)

    @pytest.mark.parametrize("kind", ["exit", "cancelled"])
    def test_what_would_end_more_than_a_call_ends_only_that(self, kind: str) -> None:
        """A worker that exits or cancels itself costs its own sample."""

        async def story(pool: Pool) -> None:
            with pytest.raises(RuntimeError, match="the worker"):
                await pool.call(("fail", kind))
            assert await pool.call(("echo", 1)) == 1

        self.use(story)

    def test_a_late_call_times_out_and_is_cancelled_where_it_runs(self, tmp_path: Path) -> None:
        """The worker's own cleaning up has happened once the caller knows."""

        async def story(pool: Pool) -> None:
            begin_s = time.monotonic()
            with pytest.raises(TimeoutError, match=r"no answer within 0\.5 s"):
                await pool.call(("tidy", str(tmp_path / "late")), timeout_s=0.5)
            assert (tmp_path / "late").exists()
            assert 0.5 <= time.monotonic() - begin_s < 5
            assert pool.in_flight == 0

        self.use(story)

    def test_a_cancelled_call_is_cancelled_where_it_runs(self, tmp_path: Path) -> None:
        """And is in flight until that has happened."""

        async def story(pool: Pool) -> None:
            call = asyncio.ensure_future(pool.call(("tidy", str(tmp_path / "cancelled"))))
            await eventually((tmp_path / "cancelled.begun").exists)
            assert pool.in_flight == 1
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert (tmp_path / "cancelled").exists()
            assert pool.in_flight == 0

        self.use(story)

    def test_a_call_that_heeds_no_cancellation_does_not_hold_its_caller(self) -> None:
        """After a while of grace the caller goes on, and so does the pool."""

        async def story(pool: Pool) -> None:
            begin_s = time.monotonic()
            with pytest.raises(TimeoutError):
                await pool.call(("stubborn", 5.0), timeout_s=0.2)
            assert time.monotonic() - begin_s < 4
            assert pool.in_flight == 0
            assert await pool.call(("echo", 1)) == 1

        self.use(story)

    def test_the_count_falls_on_every_end(self) -> None:
        """Success, failure, time-out and cancellation."""

        async def story(pool: Pool) -> None:
            calls = [
                asyncio.ensure_future(pool.call(request, timeout_s=limit))
                for request, limit in ((("sleep", 0.3), None), (("fail", "x"), None), (("sleep", 60), 0.5))
            ]
            doomed = asyncio.ensure_future(pool.call(("sleep", 60)))
            await asyncio.sleep(0.05)
            assert pool.in_flight >= 3
            doomed.cancel()
            await asyncio.gather(*calls, doomed, return_exceptions=True)
            assert pool.in_flight == 0

        self.use(story)

    def test_updates_reach_every_worker(self) -> None:
        """Each answers, and an exception arrives as itself."""

        async def story(pool: Pool) -> None:
            assert set(await pool.publish("v2")) == {"w:v2"}
            assert set(await asyncio.gather(*(pool.call(("heard", None)) for _ in range(8)))) == {"v2"}
            with pytest.raises(KeyError, match="bad update"):
                await pool.publish(KeyError("bad update"), timeout_s=10)

        self.use(story, functools.partial(Probe, "w:"))

    def test_a_builder_that_fails_fails_the_start(self) -> None:
        """With its own exception."""
        pool = self.make_pool(refuse)
        with pytest.raises(Trouble, match="no worker today"):
            asyncio.run(pool.start())

    def test_closing_ends_what_is_in_flight(self, tmp_path: Path) -> None:
        """Its callers are told, and the worker cleans up."""

        async def story(pool: Pool) -> None:
            call = asyncio.ensure_future(pool.call(("tidy", str(tmp_path / "closed"))))
            await eventually((tmp_path / "closed.begun").exists)
            await pool.close()
            with pytest.raises(WorkerLost, match="closed"):
                await call
            assert (tmp_path / "closed").exists()
            with pytest.raises(RuntimeError, match="not open"):
                await pool.call(("echo", 1))

        self.use(story)
