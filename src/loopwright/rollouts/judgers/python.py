"""The Python judger: calls a user's function with the facts that its parameters name."""

import inspect
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from loopwright.core.config import FUNCTION
from loopwright.core.errors import Problem, sentence
from loopwright.core.imports import import_function
from loopwright.core.trial import Reward
from loopwright.rollouts.judgers.base import (
    BaseJudger,
    BatchJudger,
    BatchJudgerConfig,
    JudgeFailed,
    Judger,
    JudgerConfig,
    Payload,
    Verdict,
    check_facts,
)
from loopwright.rollouts.judgers.verdict_parsing import as_reward, check_entries, or_failure
from loopwright.rollouts.pools.base import contain_failures
from loopwright.rollouts.threads import Threads, TooManyHangingCalls


class UserFunction:
    """A user's function. A synchronous one is called in a thread, an asynchronous one on the event loop."""

    def __init__(self, function: Callable[..., Any], *, threads: int = 1) -> None:
        self._function, self._name = function, getattr(function, "__name__", type(function).__name__)
        call = getattr(function, "__call__", None)  # noqa: B004  it may be an object with an asynchronous __call__
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
        self._threads = Threads("loopwright-judge", max_threads=threads)

    @classmethod
    def load(cls, path: str, scenario_dir: Path, *, threads: int = 1) -> "UserFunction":
        """Import `module:function`, from the scenario's directory first."""
        return cls(import_function(path, scenario_dir), threads=threads)

    @property
    def facts(self) -> tuple[str, ...]:
        """The facts that its parameters name; TypeError or ValueError if they name something else."""
        try:
            parameters = inspect.signature(self._function).parameters.values()
        except (TypeError, ValueError) as error:
            raise TypeError("its signature cannot be read; write it as a Python function") from error
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(f"name each parameter instead of taking {parameter}")
        return check_facts(tuple(parameter.name for parameter in parameters))

    def check_one_argument(self) -> None:
        """Raise TypeError unless it can be called with one positional argument."""
        try:
            inspect.signature(self._function).bind(None)
        except TypeError as error:
            raise TypeError("it must take one argument") from error

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns. A SystemExit inside is a failure like any other."""
        if self._is_async:
            return await contain_failures(self._function(*args, **kwargs))
        try:
            value = await self._threads.run(partial(copy_context().run, self._function, *args, **kwargs))
        except TooManyHangingCalls as error:
            raise JudgeFailed(
                f"{self._name!r} is not called any more: {error} Use a command judger, which can be killed."
            ) from error
        return await contain_failures(value) if inspect.isawaitable(value) else value

    def close(self) -> None:
        """Release its idle threads."""
        self._threads.close()


class PythonJudgerConfig(BatchJudgerConfig):
    """A Python function, synchronous or not. With `batch` it is given a list of each fact and returns a list."""

    type: Literal["python"] = "python"
    function: str = Field(pattern=FUNCTION)
    """`module:function`, imported from the scenario's directory first. Its parameters are named after the facts that it
    needs: answer, label, data_source, task, messages, tokens, turns, extra, episode. It returns a finite number, a
    bool, a Reward or a dict of named parts, which add up."""

    def label(self) -> str:
        return self.name or self.function.rpartition(":")[2].rpartition(".")[2]

    def problems(self, scenario_dir: Path) -> list[Problem]:
        try:
            UserFunction.load(self.function, scenario_dir).facts  # noqa: B018  reading them checks them
        except (ImportError, TypeError, ValueError) as error:
            return [Problem("function", f"{self.function!r}: {sentence(error)}")]
        return []


class FunctionJudger(Judger):
    """Calls a Python function for each episode: `FunctionJudger(lambda answer, label: answer == label)`."""

    def __init__(self, function: Callable[..., Any], config: JudgerConfig | None = None) -> None:
        super().__init__(config or JudgerConfig(type=getattr(function, "__name__", "function")))
        self._function = UserFunction(function, threads=self.config.concurrency)
        self.needs = self._function.facts

    async def judge(self, payload: Payload) -> Reward:
        value = await self._function(**payload.only(self.needs).facts)
        return as_reward(value, self.config.label())

    async def close(self) -> None:
        self._function.close()


class PythonJudger(FunctionJudger):
    """Calls the function that the config names."""

    Config: ClassVar[type[JudgerConfig]] = PythonJudgerConfig

    @classmethod
    def build(cls, config: PythonJudgerConfig, scenario_dir: Path) -> BaseJudger:
        function = import_function(config.function, scenario_dir)
        return cls(function, config) if config.batch == 1 else PythonBatchJudger(function, config)


class PythonBatchJudger(BatchJudger):
    """Calls the function once for each batch, with a list for each fact."""

    Config: ClassVar[type[JudgerConfig]] = PythonJudgerConfig

    def __init__(self, function: Callable[..., Any], config: PythonJudgerConfig) -> None:
        super().__init__(config)
        self._function = UserFunction(function, threads=config.concurrency)
        self.needs = self._function.facts

    async def judge_batch(self, payloads: Sequence[Payload]) -> list[Verdict]:
        facts = {name: [getattr(payload, name) for payload in payloads] for name in self.needs}
        values = check_entries(await self._function(**facts), self.config.label(), len(payloads))
        return [or_failure(self._parse, value) for value in values]

    def _parse(self, value: Any) -> Reward:
        name = self.config.label()
        if isinstance(value, Exception):
            raise JudgeFailed(f"judger {name!r} gave no verdict: {type(value).__name__}: {value}".rstrip(": "))
        return as_reward(value, name)

    async def close(self) -> None:
        self._function.close()
