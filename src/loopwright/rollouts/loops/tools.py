"""The tool loop: the policy calls tools, turn by turn, until it answers without a call."""

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
from loopwright.rollouts.loops.base import AgentLoop, LoopConfig, describe_error, truncated_episode
from loopwright.rollouts.pools.base import contain_failures
from loopwright.rollouts.threads import Threads, TooManyHangingCalls


class ToolLoopConfig(LoopConfig):
    """Several turns, with tools that are Python functions."""

    type: Literal["tools"] = "tools"
    tools: tuple[str, ...] = Field(min_length=1)
    """`module:function` each; the policy sees its signature and docstring."""
    max_turns: int | None = Field(default=8, ge=1)
    """How many turns the policy has; a rollout that needs more is `truncated` and scored as it is."""
    tool_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds for one call; a timeout is returned to the policy as an error."""
    max_tool_chars: int = Field(default=8000, ge=1)
    """How many characters of a tool's output the policy sees."""

    def problems(self, scenario_dir: Path) -> list[Problem]:
        problems, names = list[Problem](), list[str]()
        for index, path in enumerate(self.tools):
            try:
                names.append(FunctionTool(import_function(path, scenario_dir)).name)
            except (ImportError, TypeError, ValueError) as error:
                problems.append(Problem(f"tools[{index}]", f"{path!r}: {error}."))
        duplicates = [name for name, count in Counter(names).items() if count > 1]
        return problems + [
            Problem("tools", f"two tools are called {name!r}; rename one of them.") for name in duplicates
        ]


class FunctionTool:
    """A Python function that the policy can call, described by its signature and docstring."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name, self._function = getattr(function, "__name__", type(function).__name__), function
        self.is_async = inspect.iscoroutinefunction(function)
        try:
            self._model = _model_of(function)
            parameters = self._model.model_json_schema(schema_generator=_Untitled)
        except Exception as error:  # a user's annotations may raise anything
            raise TypeError(f"its signature cannot be described to a policy: {error}") from error
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
        """The call with these arguments, a JSON object; ValidationError if they do not fit."""
        parsed = self._model.model_validate_json(arguments)
        fields = type(parsed).model_fields
        values = {str(fields[key].alias): getattr(parsed, key) for key in parsed.model_fields_set}
        return lambda: self._function(**values)


class ToolLoop(AgentLoop):
    """Samples a turn, runs the tools that it calls, and repeats."""

    Config: ClassVar[type[LoopConfig]] = ToolLoopConfig
    config: ToolLoopConfig

    def __init__(self, config: ToolLoopConfig, scenario_dir: Path) -> None:
        super().__init__(config, scenario_dir)
        self._tools = {
            tool.name: tool for tool in (FunctionTool(import_function(p, scenario_dir)) for p in config.tools)
        }
        self._schemas = [tool.schema for tool in self._tools.values()]
        self._threads = Threads("loopwright-tool", max_threads=max(64, config.concurrency))

    async def run(self, task: Task, session: Session) -> Episode:
        messages: list[Message] = list(task.messages)
        while True:
            turn = await session.turn(messages, self._schemas)
            if turn.finish == "length":
                return truncated_episode(task, session)
            if not turn.calls and not turn.malformed:
                return session.episode(task)
            with session.phase("tools"):
                results = await self._run_tools(turn)
            messages += [turn.message, *results]

    async def _run_tools(self, turn: Turn) -> list[Message]:
        """The results of the tools, in the order of the calls; they run concurrently."""
        outputs = await asyncio.gather(*(self._call(call["function"]) for call in turn.calls))
        results: list[Message] = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}
            for call, text in zip(turn.calls, outputs, strict=True)
        ]
        error = 'error: this call is not a JSON object with "name" and "arguments": '
        return results + [{"role": "tool", "content": error + text[:200]} for text in turn.malformed]

    async def _call(self, function: Mapping[str, Any]) -> str:
        """The result of a tool call. Errors are returned to the policy, which chose the call."""
        tool = self._tools.get(function["name"])
        if tool is None:
            return f"error: unknown tool {function['name']!r}; the tools are {', '.join(self._tools)}"
        try:
            call = tool.bind(function["arguments"])
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            return f"error: invalid arguments for {tool.name}: {problems}"
        deadline = asyncio.timeout(self.config.tool_timeout_s)
        try:
            async with deadline:
                value = await (contain_failures(call()) if tool.is_async else self._threads.run(call))
                if inspect.isawaitable(value):
                    value = await contain_failures(value)
            return _as_text(value)[: self.config.max_tool_chars]
        except TooManyHangingCalls:
            raise
        except Exception as error:  # noqa: BLE001  a user's tool may raise anything
            if isinstance(error, TimeoutError) and deadline.expired():
                return f"error: {tool.name} took longer than {self.config.tool_timeout_s:g} s"
            return _clean(f"error: {describe_error(error)}")

    async def close(self) -> None:
        self._threads.close()


class _Untitled(GenerateJsonSchema):
    """Generates JSON schemas without pydantic's titles, which only cost tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _model_of(function: Callable[..., Any]) -> type[BaseModel]:
    """The model that validates a call's arguments."""
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"name each argument instead of taking {parameter}")
        annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
        # By alias, so that an argument can have any name: `schema`, `copy` and `_x` are special in pydantic.
        fields[f"argument_{len(fields)}"] = annotation, _field(name, parameter.default)
    return create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)


def _field(name: str, default: Any) -> Any:
    if default is inspect.Parameter.empty:
        return Field(alias=name)
    try:
        json.dumps(default)
    except (TypeError, ValueError):
        return Field(alias=name, default_factory=lambda: default)  # it cannot be shown in a schema
    return Field(default, alias=name)


def _as_text(value: Any) -> str:
    """What a tool returned, as text. Not by orjson, which rejects integers of more than 64 bits."""
    if not isinstance(value, str):
        try:
            value = json.dumps(value, default=str, ensure_ascii=False)
        except (TypeError, ValueError):
            value = str(value)
    return _clean(value)


def _clean(text: str) -> str:
    """Text that can be stored as UTF-8; file names in a tool's output may contain other bytes."""
    return text.encode("utf-8", "replace").decode()
