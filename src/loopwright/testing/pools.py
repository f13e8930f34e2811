"""What every pool guarantees, as tests; callers see no difference between pools.

class TestMine(PoolContract):
    def make_pool(self, build: WorkerFactory) -> Pool:
        return Mine(build)
"""
# ruff: noqa: S101  These are tests.

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
    """An exception whose constructor takes other arguments than it stores, which breaks plain pickling."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"{what} ({code})")
        self.code = code


class Probe(Worker):
    """Does what its request says: the name of a method, and its argument."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.update: Any = None

    async def handle(self, request: Any) -> Any:
        method, argument = request
        return await getattr(self, method)(argument)

    async def apply_update(self, update: Any) -> Any:
        if isinstance(update, Exception):
            raise update
        self.update = update
        return f"{self.prefix}{update}"

    async def echo(self, argument: Any) -> Any:
        """Return the argument."""
        return argument

    async def latest_update(self, argument: Any) -> Any:
        """The latest update."""
        return self.update

    async def fail(self, argument: str) -> Any:
        """Raise a custom, built-in or local exception, or one that would end more than a call."""
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
        raise TimeoutError("raised by the worker")

    async def sleep(self, argument: float) -> float:
        """Sleep; can be cancelled."""
        await asyncio.sleep(argument)
        return argument

    async def clean_up(self, argument: str) -> None:
        """Never return; write a file when cancelled."""
        path = Path(argument)
        path.with_suffix(".started").touch()
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0.05)
            path.touch()  # noqa: ASYNC240  Test code.

    async def stubborn(self, argument: float) -> None:
        """Ignore cancellation for this many seconds."""
        until_s = time.monotonic() + argument
        while time.monotonic() < until_s:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    async def pid(self, argument: Any) -> int:
        """The id of the worker's process."""
        return os.getpid()


def fail_to_build() -> Worker:
    """A worker factory that fails."""
    raise Trouble(5, "no worker today")


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for something to become true."""
    until_s = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < until_s, "the condition never became true"
        await asyncio.sleep(0.01)


class PoolContract(ABC):
    """Subclass it, name the subclass `Test…`, and give it a pool with a grace period of about one second."""

    @abstractmethod
    def make_pool(self, build: WorkerFactory) -> Pool:
        """A pool of the workers that `build` creates."""

    def use(self, body: Callable[[Pool], Awaitable[T]], build: WorkerFactory = Probe) -> T:
        """Run `body` with a started pool in an event loop, and close the pool."""

        async def main() -> T:
            pool = self.make_pool(build)
            await pool.start()
            try:
                return await asyncio.wait_for(body(pool), _DEADLINE_S)
            finally:
                await pool.close()
                assert pool.in_flight == 0

        return asyncio.run(main())

    def test_answers_arrive_unchanged(self) -> None:
        """Values of all kinds, many at a time, each to the right caller."""

        async def body(pool: Pool) -> None:
            assert await pool.call(("echo", {"ids": [1, 2], "blob": b"\0", "none": None})) == {
                "ids": [1, 2],
                "blob": b"\0",
                "none": None,
            }
            assert await asyncio.gather(*(pool.call(("echo", n)) for n in range(200))) == list(range(200))

        self.use(body)

    def test_exceptions_arrive_unchanged(self) -> None:
        """With their class, message and attributes, and without traces of the transport."""

        async def body(pool: Pool) -> None:
            with pytest.raises(Trouble) as caught:
                await pool.call(("fail", "trouble"))
            assert type(caught.value) is Trouble
            assert (str(caught.value), caught.value.code) == ("no luck (7)", 7)
            with pytest.raises(TimeoutError, match="raised by the worker") as late:
                await pool.call(("fail", "late"), timeout_s=30)
            assert type(late.value) is TimeoutError
            with pytest.raises(KeyError, match="only here"):
                await pool.call(("fail", "local"))

        self.use(body)

    @pytest.mark.parametrize("kind", ["exit", "cancelled"])
    def test_an_exit_or_cancellation_ends_only_its_call(self, kind: str) -> None:
        """A worker that exits or cancels itself fails one call."""

        async def body(pool: Pool) -> None:
            with pytest.raises(RuntimeError, match="the worker"):
                await pool.call(("fail", kind))
            assert await pool.call(("echo", 1)) == 1

        self.use(body)

    def test_a_late_call_times_out_and_is_cancelled_where_it_runs(self, tmp_path: Path) -> None:
        """The worker has cleaned up by the time the caller gets the error."""

        async def body(pool: Pool) -> None:
            start_s = time.monotonic()
            with pytest.raises(TimeoutError, match=r"no answer within 0\.5 s"):
                await pool.call(("clean_up", str(tmp_path / "late")), timeout_s=0.5)
            assert (tmp_path / "late").exists()
            assert 0.5 <= time.monotonic() - start_s < 5
            assert pool.in_flight == 0

        self.use(body)

    def test_a_cancelled_call_is_cancelled_where_it_runs(self, tmp_path: Path) -> None:
        """It counts as in flight until the worker has cleaned up."""

        async def body(pool: Pool) -> None:
            call = asyncio.ensure_future(pool.call(("clean_up", str(tmp_path / "cancelled"))))
            await eventually((tmp_path / "cancelled.started").exists)
            assert pool.in_flight == 1
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert (tmp_path / "cancelled").exists()
            assert pool.in_flight == 0

        self.use(body)

    def test_a_call_that_ignores_cancellation_does_not_block_its_caller(self) -> None:
        """The caller continues after the grace period, and the pool still works."""

        async def body(pool: Pool) -> None:
            start_s = time.monotonic()
            with pytest.raises(TimeoutError):
                await pool.call(("stubborn", 5.0), timeout_s=0.2)
            assert time.monotonic() - start_s < 4
            assert pool.in_flight == 0
            assert await pool.call(("echo", 1)) == 1

        self.use(body)

    def test_the_count_falls_however_a_call_ends(self) -> None:
        """By success, failure, timeout or cancellation."""

        async def body(pool: Pool) -> None:
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

        self.use(body)

    def test_updates_reach_every_worker(self) -> None:
        """Each worker answers, and exceptions arrive unchanged."""

        async def body(pool: Pool) -> None:
            assert set(await pool.publish("v2")) == {"w:v2"}
            assert set(await asyncio.gather(*(pool.call(("latest_update", None)) for _ in range(8)))) == {"v2"}
            with pytest.raises(KeyError, match="bad update"):
                await pool.publish(KeyError("bad update"), timeout_s=10)

        self.use(body, functools.partial(Probe, "w:"))

    def test_a_failing_factory_fails_the_start(self) -> None:
        """With the factory's exception."""
        pool = self.make_pool(fail_to_build)
        with pytest.raises(Trouble, match="no worker today"):
            asyncio.run(pool.start())

    def test_closing_ends_calls_in_flight(self, tmp_path: Path) -> None:
        """Their callers get WorkerLost, and the worker cleans up."""

        async def body(pool: Pool) -> None:
            call = asyncio.ensure_future(pool.call(("clean_up", str(tmp_path / "closed"))))
            await eventually((tmp_path / "closed.started").exists)
            await pool.close()
            with pytest.raises(WorkerLost, match="closed"):
                await call
            assert (tmp_path / "closed").exists()
            with pytest.raises(RuntimeError, match="not open"):
                await pool.call(("echo", 1))

        self.use(body)
