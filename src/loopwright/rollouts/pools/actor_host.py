"""What runs in a Ray actor: one worker, with the deadlines and the cancellation of its calls."""

import asyncio
import mmap
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

from loopwright.rollouts.pools.base import (
    EventLoopBlocked,
    StreamingWorker,
    Worker,
    WorkerFactory,
    contain_failures,
    timeout_error,
)
from loopwright.rollouts.pools.serialization import pack, pack_exception, unpack
from loopwright.rollouts.pools.steps import StepWatch, WatchedCall, watch_tasks

_MARK_BYTES = 8
_PATIENCE_S = 10.0
"""How long code may block the event loop beyond its deadline. The actor that ends then may take long to replace."""


def build_below(build: Callable[..., Worker], scenario_dir: Path) -> Worker:
    """Build a worker in an actor. A relative directory is below the working directory that was sent to its node."""
    return build(scenario_dir=scenario_dir.absolute())


class ActorHost:
    """A worker behind methods that take and return packed values; they raise nothing but a cancellation.

    An answer is a pair: the packed exception or None, and the result.
    """

    def __init__(self, path: list[str], mark_name: str) -> None:
        sys.path[:0] = [entry for entry in map(os.path.abspath, path) if entry not in sys.path]
        self._worker: Worker | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._ended = asyncio.Event()
        self._mark_file = mark_file(mark_name)
        self._mark = _open_mark(self._mark_file)
        self._watch = StepWatch(self._mark)

    async def start(self, build: bytes, update: bytes | None) -> bytes:
        """Build the worker and apply the latest update; answers with its description and the update's answer."""
        watch_tasks()
        try:
            factory: WorkerFactory = unpack(build)
            worker = factory()
            self._watch.when_overdue(self._end_for, _PATIENCE_S)
            answer = None if update is None else await contain_failures(worker.apply_update(unpack(update)))
            self._worker = worker  # only now: others may find the actor by its name
            return pack((None, (worker.describe(), worker.describe_calls(), answer)), "an answer")
        except Exception as error:  # noqa: BLE001  Every exception is sent to the caller.
            return pack((pack_exception(error), None))

    async def handle(self, data: bytes) -> bytes:
        """Answer one request; the data holds its number, its remaining time, its whole time, and the request."""
        return await self._run("handle", data)

    async def stream(self, data: bytes) -> AsyncGenerator[bytes, None]:
        """Answer one request piece by piece; an exception is the last piece. The data holds the request only."""
        try:
            if not isinstance(self._worker, StreamingWorker):
                raise TypeError(f"{type(self._worker).__name__} does not stream its answers")
            async with aclosing(self._worker.stream(unpack(data))) as pieces:
                async for piece in pieces:
                    yield pack((None, piece), "an answer")
        except Exception as error:  # noqa: BLE001  Every exception is sent to the caller.
            yield pack((pack_exception(error), None))

    async def apply_update(self, data: bytes) -> bytes:
        """Apply an update, packed like a request."""
        return await self._run("apply_update", data)

    async def wait_for_end(self) -> None:
        """Returns only when the actor is stopped, so a caller that awaits this learns of its death at once."""
        await self._ended.wait()

    async def stop(self) -> None:
        """Cancel all calls and close the worker."""
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(set(self._calls))
        if self._worker is not None:
            await self._worker.close()
        self._mark_file.unlink(missing_ok=True)
        self._ended.set()

    async def _run(self, method: str, data: bytes) -> bytes:
        call = asyncio.current_task()
        if call is None or self._worker is None:
            raise RuntimeError("the actor was called before it was started")
        self._calls.add(call)
        try:
            number, left_s, timeout_s, request = unpack(data)
            try:
                async with asyncio.timeout(left_s) as deadline:
                    work = contain_failures(getattr(self._worker, method)(request))
                    answer = await self._watched(WatchedCall(number), work)
            except TimeoutError:
                if deadline.expired():
                    raise timeout_error(timeout_s) from None
                raise
            return pack((None, answer), "an answer")
        except Exception as error:  # noqa: BLE001  Every exception is sent to the caller.
            return pack((pack_exception(error), None))
        finally:
            self._calls.discard(call)

    def _end_for(self, call: WatchedCall) -> None:
        """Code that never returns can only be ended with its process; the negative mark tells whose it is, and why."""
        self._mark(-call.number)
        os._exit(1)

    async def _watched(self, call: WatchedCall, work: Coroutine[Any, Any, Any]) -> Any:
        """Await a call, but not one whose code ignores everything. One that only ignores this is killed by the pool."""
        name = "" if self._worker is None else self._worker.describe_calls()
        task, over = self._watch.start(call, work, name), asyncio.Event()
        call.on_give_up = over.set
        task.add_done_callback(lambda _: over.set())
        try:
            await over.wait()
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        if not task.done():
            raise EventLoopBlocked(call.hopeless)
        return task.result()


def mark_file(name: str) -> Path:
    """The file on an actor's machine in which it marks the call that runs; it outlives the actor's process."""
    memory = Path("/dev/shm")  # noqa: S108  a file in memory, if there can be one
    return (memory if memory.is_dir() else Path(tempfile.gettempdir())) / f"loopwright-{name}"


def read_mark(name: str) -> int:
    """The number of the call whose code ran when an actor died; 0 if none ran or nobody knows. Removes the file.

    It is negative if the actor ended because this code blocked its event loop.
    """
    file = mark_file(name)
    try:
        return int.from_bytes(file.read_bytes(), "little", signed=True)
    except OSError:
        return 0
    finally:
        file.unlink(missing_ok=True)


def _open_mark(file: Path) -> Callable[[int], None]:
    file.write_bytes(bytes(_MARK_BYTES))
    with file.open("r+b") as opened:
        memory = mmap.mmap(opened.fileno(), _MARK_BYTES)

    def mark(number: int) -> None:
        memory[:] = number.to_bytes(_MARK_BYTES, "little", signed=True)

    return mark
