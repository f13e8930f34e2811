"""Pools: the same worker in this process, in one Ray actor, or in many behind a router; callers cannot tell."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from loopwright.core.errors import LoopwrightError


class WorkerLost(LoopwrightError, ConnectionError):
    """A worker died with a call in it, and so did the one that the call was issued to again."""


class PoolDown(WorkerLost):
    """A pool has no worker left and cannot make one: nothing can be done there until somebody looks into it."""


class SerializationError(LoopwrightError, TypeError):
    """Something that cannot be sent to another process, or not be read there."""


class Worker(ABC):
    """What a pool has one or more of: an agent loop with its engine, or a judger.

    class Echo(Worker):
        async def handle(self, request: Any) -> Any:
            return request
    """

    @abstractmethod
    async def handle(self, request: Any) -> Any:
        """Answer one request; many are in flight at a time."""

    def stream(self, request: Any) -> AsyncGenerator[Any, None]:
        """Answer one request piece by piece, where that is what a worker does."""
        raise TypeError(f"{type(self).__name__} gives its answers whole")

    def describe(self) -> Any:
        """What callers must know about the worker before their first request, such as what a judger needs."""
        return None

    async def apply_update(self, update: Any) -> Any:
        """Apply something that concerns every worker, such as a weight update.

        A worker that replaces a dead one gets the latest update before its first request, so an update must describe
        the whole state, not a change.
        """
        return None

    async def close(self) -> None:
        """Let go of everything."""


class Pool(ABC):
    """Workers, one or more, near or far."""

    @abstractmethod
    async def start(self) -> None:
        """Have the workers ready. What a worker's `build` raises arrives as itself."""

    @abstractmethod
    async def call(self, request: Any, *, timeout_s: float | None = None) -> Any:
        """A worker's answer. Its exceptions arrive as themselves; TimeoutError after `timeout_s`.

        A call that is cancelled or too late is cancelled where it runs. One whose worker died is issued again once.
        """

    @abstractmethod
    async def publish(self, update: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Send an update to every worker, and return what each of them answered."""

    @property
    @abstractmethod
    def description(self) -> Any:
        """What a started worker's `describe` returned; it is the same for all workers."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """How many calls are being worked on, or wait for a worker."""

    @abstractmethod
    async def close(self) -> None:
        """End the workers. Calls that are still in flight are cancelled where they run, and raise WorkerLost."""


WorkerFactory = Callable[[], Worker]
"""Makes a worker where it will live; must be picklable where that is another process."""


async def answered(work: Awaitable[Any]) -> Any:
    """Await a worker's own code, whose failures must stay failures of one call."""
    try:
        return await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("the worker cancelled its own call; nobody else did") from None
    except (SystemExit, GeneratorExit) as error:
        raise RuntimeError(f"the worker raised {error!r}, which would have ended more than its call") from error


def timeout_error(timeout_s: float | None) -> TimeoutError:
    """What a call raises that had no answer in time."""
    return TimeoutError(f"no answer within {timeout_s:g} s" if timeout_s is not None else "no answer in time")
