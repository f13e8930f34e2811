"""Handlers: functions of the user's, called off the event loop unless they are asynchronous."""

import inspect
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

from loopwright.core.imports import import_function
from loopwright.rollouts.judgers.base import JudgeFailed
from loopwright.rollouts.pools.base import answered
from loopwright.rollouts.threads import Threads, TooManyHangingCalls


class Handler:
    """`module:function`, imported from the scenario's directory first."""

    def __init__(self, path: str, home: Path, *, threads: int = 1) -> None:
        self.path = path
        self._function = import_function(path, home)
        self._asynchronous = _is_asynchronous(self._function)
        self._threads = Threads("loopwright-judge", most=threads)

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
            return await answered(self._function(*args, **kwargs))
        try:
            value = await self._threads.run(partial(copy_context().run, self._function, *args, **kwargs))
        except TooManyHangingCalls as error:
            raise JudgeFailed(
                f"{self.path!r} is called no more: {error} A command judger can be ended, a function cannot."
            ) from error
        return await answered(value) if inspect.isawaitable(value) else value

    def close(self) -> None:
        """Let its threads go."""
        self._threads.close()


def _is_asynchronous(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
