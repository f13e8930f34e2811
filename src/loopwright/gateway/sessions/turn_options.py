"""Turn options: how one turn is prompted and parsed, from the request's tool choice and response format.

Sampling is never constrained. A turn that has to start in a certain way (a forced tool call, a JSON object) starts with
given tokens; what follows is sampled freely and may still not match.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import orjson

from loopwright.gateway.dialects.fields import BadRequest, non_empty_text, optional_flag, to_json
from loopwright.gateway.sessions.tool_calls import Grammar, Tool

_JSON_INSTRUCTION = "Answer with a JSON object and nothing else."
_SCHEMA_INSTRUCTION = "{form} It has to match this JSON schema:\n{schema}"


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """How one turn is prompted and parsed. They are stored with the call."""

    prefill: str = ""
    """Text the turn starts with. Given to the policy, never trained on."""
    prefill_visible: bool = True
    """False if the client wrote the prefill itself."""
    instruction: str = ""
    """Appended to the prompt for this turn only, for example a JSON schema."""
    parse_tool_calls: bool = True
    """Whether tool calls are parsed; otherwise they are text."""
    single_tool_call: bool = False
    """Whether the turn ends where a second call would start."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The client's arguments for the chat template, such as `enable_thinking`."""

    @classmethod
    def from_openai(cls, body: Mapping[str, Any], tools: Sequence[Tool], grammar: Grammar, instruction: str) -> Self:
        """From the fields of OpenAI's chat completions and Responses."""
        choice = body.get("tool_choice")
        kind, name = choice, None
        if isinstance(choice, dict):
            kind = choice.get("type")
            function = choice.get("function", choice)  # Responses put the name beside the type
            name = function.get("name") if isinstance(function, Mapping) else None
        single = optional_flag(body, "parallel_tool_calls") is False
        return cls.from_tool_choice(kind, name, tools, grammar, single=single, instruction=instruction)

    @classmethod
    def from_tool_choice(
        cls,
        kind: Any,
        name: Any,
        tools: Sequence[Tool],
        grammar: Grammar,
        *,
        single: bool = False,
        instruction: str = "",
    ) -> Self:
        """From a tool choice of this kind, OpenAI's or Anthropic's, and the name of the tool if it has one."""
        parse, prefill = True, ""
        match kind:
            case None | "auto":
                # Without tools there is nothing to call, so a JSON answer can start right away.
                parse = bool(tools) or not instruction
            case "none":
                parse = False
            case "required" | "any":
                if not tools:
                    raise BadRequest("tool_choice: there are no tools to choose from", "tool_choice")
                prefill = grammar.opening(tools[0]["function"]["name"] if len(tools) == 1 else None)
            case "function" | "tool" | "custom":
                if non_empty_text(name, "tool_choice.name") not in [tool["function"]["name"] for tool in tools]:
                    raise BadRequest(f"tool_choice.name: no tool {name!r:.60} in `tools`", "tool_choice.name")
                prefill = grammar.opening(name)
            case _:
                raise BadRequest(
                    f"tool_choice: {kind!r:.60} is not supported; choose auto, none, required or a function",
                    "tool_choice",
                )
        if instruction and not parse:
            prefill = "{"
        return cls(prefill, instruction=instruction, parse_tool_calls=parse, single_tool_call=single)

    def as_json(self) -> str:
        """As JSON for the store, without defaults."""
        if self == PLAIN:
            return "{}"
        names = [each.name for each in fields(self) if getattr(self, each.name) != getattr(PLAIN, each.name)]
        return orjson.dumps({name: getattr(self, name) for name in names}).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `as_json` wrote."""
        values = orjson.loads(text)
        return cls(**{each.name: values[each.name] for each in fields(cls) if each.name in values})


PLAIN = TurnOptions()


def format_instruction(response_format: Any, where: str) -> str:
    """The instruction for a response format; empty if any text will do."""
    if response_format is None:
        return ""
    if not isinstance(response_format, dict):
        raise BadRequest(f"{where}: expected an object", where)
    match response_format.get("type"):
        case "text":
            return ""
        case "json_object":
            return _JSON_INSTRUCTION
        case "json_schema":
            described = response_format.get("json_schema", response_format)
            schema = described.get("schema") if isinstance(described, Mapping) else None
            return _SCHEMA_INSTRUCTION.format(form=_JSON_INSTRUCTION, schema=to_json(schema, f"{where}.schema"))
        case kind:
            raise BadRequest(
                f"{where}.type: {kind!r:.60} is not supported; choose text, json_object or json_schema", where
            )
