"""The tool loop: turns of the policy and of the tools it calls, until it answers without a call."""

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from loopwright.core.episode import Episode
from loopwright.core.errors import Problem
from loopwright.core.imports import import_function
from loopwright.core.task import Message, Task
from loopwright.gateway.sessions.session import Session
from loopwright.gateway.sessions.turn import Turn
from loopwright.rollouts.loops.base import AgentLoop, LoopConfig, describe_error, out_of_tokens
from loopwright.rollouts.pools.base import contain_failures
from loopwright.rollouts.threads import Threads, TooManyHangingCalls


class ToolLoopConfig(LoopConfig):
    """Several turns, with tools that are Python functions."""

    type: Literal["tools"] = "tools"
    tools: tuple[str, ...] = Field(min_length=1)
    """`module:function` each; its signature and docstring are what the policy is told about it."""
    max_turns: int | None = Field(default=8, ge=1)
    """How many turns the policy has; a rollout that wants more is `truncated`, and is scored as it stands."""
    tool_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds for one call; the policy is told when it took too long."""
    max_tool_chars: int = Field(default=8000, ge=1)
    """How much of a tool's output the policy gets to see."""

    def problems(self, home: Path) -> list[Problem]:
        found, names = list[Problem](), list[str]()
        for index, path in enumerate(self.tools):
            try:
                names.append(FunctionTool(import_function(path, home)).name)
            except (ImportError, TypeError, ValueError) as error:
                found.append(Problem(f"tools[{index}]", f"{path!r}: {error}."))
        twice = [name for name, count in Counter(names).items() if count > 1]
        return found + [Problem("tools", f"two tools are called {name!r}; rename one of them.") for name in twice]


class FunctionTool:
    """A Python function that the policy can call, described by its signature and docstring."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name, self._function = getattr(function, "__name__", type(function).__name__), function
        self.asynchronous = inspect.iscoroutinefunction(function)
        try:
            self._model = _model_of(function)
            parameters = self._model.model_json_schema(schema_generator=_Untitled)
        except Exception as error:  # annotations are the user's own, and so is what reading them raises
            raise TypeError(f"its signature tells no policy how to call it: {error}") from error
        for part in (parameters, *parameters.get("$defs", {}).values()):
            part.pop("title", None)
        self.schema: Mapping[str, Any] = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": inspect.getdoc(function) or "",
                "parameters": parameters,
            },
        }

    def bind(self, arguments: str) -> Callable[[], Any]:
        """The call with these arguments, given as JSON; ValidationError says what is wrong with them."""
        read = self._model.model_validate_json(arguments)
        fields = type(read).model_fields
        values = {str(fields[key].alias): getattr(read, key) for key in read.model_fields_set}
        return lambda: self._function(**values)


class ToolLoop(AgentLoop):
    """Asks, runs the tools that were called, asks again."""

    Config: ClassVar[type[LoopConfig]] = ToolLoopConfig
    config: ToolLoopConfig

    def __init__(self, config: ToolLoopConfig, home: Path) -> None:
        super().__init__(config, home)
        self._tools = {tool.name: tool for tool in (FunctionTool(import_function(p, home)) for p in config.tools)}
        self._schemas = [tool.schema for tool in self._tools.values()]
        self._threads = Threads("loopwright-tool", most=max(64, config.concurrency))

    async def run(self, task: Task, session: Session) -> Episode:
        messages: list[Message] = list(task.messages)
        while True:
            turn = await session.turn(messages, self._schemas)
            if turn.finish == "length":
                return out_of_tokens(task, session)
            if not turn.calls and not turn.malformed:
                return session.episode(task)
            with session.phase("tools"):
                answers = await self._answers(turn)
            messages += [turn.message, *answers]

    async def _answers(self, turn: Turn) -> list[Message]:
        """What the tools said, in the order of the calls; they run side by side."""
        said = await asyncio.gather(*(self._call(call["function"]) for call in turn.calls))
        answers: list[Message] = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}
            for call, text in zip(turn.calls, said, strict=True)
        ]
        complaint = 'error: this call is no JSON object with "name" and "arguments": '
        answers += [{"role": "tool", "content": complaint + text[:200]} for text in turn.malformed]
        return answers

    async def _call(self, function: Mapping[str, Any]) -> str:
        """A tool's answer. Whatever goes wrong is told to the policy: it chose the call."""
        tool = self._tools.get(function["name"])
        if tool is None:
            return f"error: there is no tool {function['name']!r}; there are {', '.join(self._tools)}"
        try:
            call = tool.bind(function["arguments"])
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            return f"error: {tool.name} cannot be called like this: {problems}"
        deadline = asyncio.timeout(self.config.tool_timeout_s)
        try:
            async with deadline:
                value = await (contain_failures(call()) if tool.asynchronous else self._threads.run(call))
                if inspect.isawaitable(value):
                    value = await contain_failures(value)
            return _shown(value)[: self.config.max_tool_chars]
        except TooManyHangingCalls:
            raise
        except Exception as error:  # noqa: BLE001  a tool is the user's own and may raise anything
            if isinstance(error, TimeoutError) and deadline.expired():
                return f"error: {tool.name} took longer than {self.config.tool_timeout_s:g} s"
            return _clean(f"error: {describe_error(error)}")

    async def close(self) -> None:
        self._threads.close()


class _Untitled(GenerateJsonSchema):
    """JSON schemas without pydantic's titles, which only cost tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _model_of(function: Callable[..., Any]) -> type[BaseModel]:
    """What a call's arguments are checked against."""
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"name each argument instead of taking {parameter}")
        kind = Any if parameter.annotation is parameter.empty else parameter.annotation
        # By alias, so that an argument may be called as it likes: `schema`, `copy` and `_x` mean something to pydantic.
        fields[f"argument_{len(fields)}"] = kind, _field(name, parameter.default)
    return create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)


def _field(name: str, default: Any) -> Any:
    if default is inspect.Parameter.empty:
        return Field(alias=name)
    try:
        json.dumps(default)
    except (TypeError, ValueError):
        return Field(alias=name, default_factory=lambda: default)  # has one, but none that can be shown
    return Field(default, alias=name)


def _shown(value: Any) -> str:
    """What a tool returned, as text. Not by orjson, which refuses integers of more than 64 bits."""
    if not isinstance(value, str):
        try:
            value = json.dumps(value, default=str, ensure_ascii=False)
        except (TypeError, ValueError):
            value = str(value)
    return _clean(value)


def _clean(text: str) -> str:
    """Text that can be stored: file names of a tool's output may hold bytes that are none."""
    return text.encode("utf-8", "replace").decode()
