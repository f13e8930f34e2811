"""Pools: the same worker in this process, in one Ray actor, or several behind a router; callers see no difference."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from loopwright.core.errors import LoopwrightError
from loopwright.rollouts.pools.steps import BLOCKING_HINT, StepInterrupted


class WorkerLost(LoopwrightError, ConnectionError):
    """A call's worker died, and so did the worker that the call was retried on."""


class PoolDown(WorkerLost):
    """A pool has no worker left and cannot start one; someone has to look into it."""


class EventLoopBlocked(LoopwrightError, TimeoutError):
    """A call blocked the event loop until it was interrupted."""


class SerializationError(LoopwrightError, TypeError):
    """A value that cannot be sent to another process, or cannot be read there."""


class Worker(ABC):
    """What a pool runs one or more of: for example an agent loop with its engine, or a judger.

    class Echo(Worker):
        async def handle(self, request: Any) -> Any:
            return request
    """

    @abstractmethod
    async def handle(self, request: Any) -> Any:
        """Answer one request; many are in flight at a time."""

    async def apply_update(self, update: Any) -> Any:
        """Apply an update that concerns every worker, such as new weights.

        A worker that replaces a dead one gets the latest update before its first request, so an update must describe
        the whole state and not a change of it.
        """
        return None

    def describe(self) -> Any:
        """What callers must know about the worker before their first request, such as what a judger needs."""
        return None

    def describe_calls(self) -> str:
        """What its calls run, for warnings: usually user code."""
        return type(self).__name__

    async def close(self) -> None:
        """Release all resources."""


class StreamingWorker(Worker):
    """A worker that can also answer piece by piece."""

    @abstractmethod
    def stream(self, request: Any) -> AsyncGenerator[Any, None]:
        """Answer one request piece by piece."""


class Pool(ABC):
    """One or more workers of the same kind, in this process or elsewhere.

    Subclass `loopwright.testing.PoolContract` to test one.
    """

    @abstractmethod
    async def start(self) -> None:
        """Start the workers. Exceptions of the worker factory are raised unchanged."""

    @abstractmethod
    async def call(self, request: Any, *, timeout_s: float | None = None) -> Any:
        """A worker's answer. Its exceptions are raised unchanged; TimeoutError after `timeout_s`.

        A call that is cancelled or times out is cancelled in its worker too. If the worker dies, the call is retried
        once.
        """

    @abstractmethod
    async def publish(self, update: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Send an update to every worker; their answers."""

    @property
    def description(self) -> Any:
        """What `describe` of a started worker returned, if it is the same for all workers."""
        return None

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """How many calls are running or waiting for a worker."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the workers. Calls in flight are cancelled in their workers and raise WorkerLost."""


WorkerFactory = Callable[[], Worker]
"""Builds a worker in the process where it will run; must be picklable if that is another process."""


async def contain_failures(work: Awaitable[Any]) -> Any:
    """Await user code, so that whatever it raises fails one call and nothing else."""
    try:
        return await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("the worker cancelled its own call") from None
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        if BaseExceptionGroup("", [error]).subgroup(StepInterrupted) is not None:  # perhaps in a task of a group
            raise EventLoopBlocked(f"it blocked the event loop and was interrupted. {BLOCKING_HINT}") from None
        if asyncio._get_running_loop() is None:
            raise  # an abandoned call is deleted after its event loop has ended
        raise RuntimeError(f"the worker raised {error!r}, which would have ended more than its call") from error


def timeout_error(timeout_s: float | None) -> TimeoutError:
    """The exception of a call that had no answer in time."""
    return TimeoutError(f"no answer within {timeout_s:g} s" if timeout_s is not None else "no answer in time")
