"""Handlers: functions of the user's, called off the event loop unless they are asynchronous."""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from loopwright.core.imports import import_function
from loopwright.rollouts.judger import JudgeFailed
from loopwright.rollouts.threads import Threads

MOST_LEFT = 512
"""How many calls that never return a handler may leave behind before it is called no more."""


class Handler:
    """`module:function`, imported from the scenario's directory first."""

    def __init__(self, path: str, home: Path, *, threads: int = 1) -> None:
        self.path = path
        self._function = import_function(path, home)
        self._asynchronous = _is_asynchronous(self._function)
        self._threads = Threads("loopwright-judge", most=threads)
        self._lock = threading.Lock()
        self._left = 0

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of what it takes; TypeError if they do not tell."""
        try:
            found = inspect.signature(self._function).parameters.values()
        except (TypeError, ValueError) as error:
            raise TypeError("its signature cannot be read; write it as a Python function") from error
        for parameter in found:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(f"name each parameter instead of taking {parameter}")
        return tuple(parameter.name for parameter in found)

    def takes_one(self) -> None:
        """Raise TypeError unless it can be called with one positional argument."""
        try:
            inspect.signature(self._function).bind(None)
        except TypeError as error:
            raise TypeError("it must take one argument") from error

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns; an exit that it asks for is a failure like any other."""
        if self._asynchronous:
            return await _awaited(self._function(*args, **kwargs), self.path)
        if self._left >= MOST_LEFT:
            raise JudgeFailed(
                f"{self._left} calls of {self.path!r} never returned, so it is called no more. "
                "Find out where it hangs; a command judger can be ended, a function cannot."
            )
        value = await self._in_thread(partial(contextvars.copy_context().run, self._function, *args, **kwargs))
        return await _awaited(value, self.path) if inspect.isawaitable(value) else value

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        state = _Call()

        def work() -> Any:
            state.started = True
            try:
                return call()
            except (SystemExit, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit) as error:
                raise RuntimeError(f"{self.path!r} raised {error!r}") from error
            finally:
                with self._lock:
                    state.ended = True
                    self._left -= state.left

        try:
            return await self._threads.run(work)
        except asyncio.CancelledError:
            with self._lock:
                state.left = state.started and not state.ended
                self._left += state.left
            raise

    def close(self) -> None:
        """Let its threads go."""
        self._threads.close()


class _Call:
    """Whether a call was begun, has ended, and whether somebody gave up on it before."""

    started = False
    ended = False
    left = False


async def _awaited(value: Any, path: str) -> Any:
    try:
        return await value
    except SystemExit as error:
        raise RuntimeError(f"{path!r} raised {error!r}") from error


def _is_asynchronous(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
