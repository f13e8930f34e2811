"""Wishes: tool choice and the form of an answer, as a request words them, and what can be done about them.

Nothing is sampled otherwise than the policy would: a wish that the turn begin in a certain way is granted by beginning
it so, with tokens that are given. What follows is the policy's own, and may still disappoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loopwright.gateway.dialects import fields
from loopwright.gateway.dialects.base import BadRequest
from loopwright.gateway.sessions.calls import Grammar
from loopwright.gateway.sessions.manner import PLAIN, Manner
from loopwright.gateway.sessions.template import Tool

_ANY = ""
_FORM = "Answer with a JSON object and nothing else."
_SCHEMA = "{form} It has to match this JSON schema:\n{schema}"


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request wishes of the turn."""

    tool: str | None = None
    """The tool that it has to call; empty for any of them, None if it need not."""
    calls: bool = True
    single: bool = False
    prefill: str = ""
    """The beginning of its text, which the client has."""
    form: str = ""
    """What the policy is told of the form of its answer, which is a JSON object."""

    def manner(self, grammar: Grammar) -> Manner:
        """How to open and read a turn so that the wish comes true as far as it can."""
        if self == _NONE:
            return PLAIN
        given = self.prefill
        if self.tool is not None:
            given = grammar.opening(self.tool or None)
        elif self.form and not self.calls:
            given = given or "{"
        return Manner(given=given, shown=not self.prefill, note=self.form, calls=self.calls, single=self.single)


_NONE = Wish()


def wish(kind: Any, tool: Any, tools: Sequence[Tool], where: str, **more: Any) -> Wish:
    """The wish of a tool choice of this kind, OpenAI's or Anthropic's, for this tool if it names one."""
    match kind:
        case None | "auto":
            # Who has no tools cannot call any; an answer of a certain form can then be begun.
            return Wish(calls=bool(tools) or not more.get("form"), **more)
        case "none":
            return Wish(calls=False, **more)
        case "required" | "any" if not tools:
            raise BadRequest(f"{where}: there are no tools to choose from", where)
        case "required" | "any":
            return Wish(tool=tools[0]["function"]["name"] if len(tools) == 1 else _ANY, **more)
        case "function" | "tool":
            if fields.name(tool, f"{where}.name") not in [each["function"]["name"] for each in tools]:
                raise BadRequest(f"{where}.name: there is no tool {tool!r:.60} among `tools`", f"{where}.name")
            return Wish(tool=tool, **more)
        case _:
            raise BadRequest(
                f"{where}: {kind!r:.60} is not supported; choose auto, none, required or a function", where
            )


def openai_wish(body: Mapping[str, Any], tools: Sequence[Tool], form: str) -> Wish:
    """The wish of a request to one of OpenAI's dialects."""
    chosen = body.get("tool_choice")
    kind, named = chosen, None
    if isinstance(chosen, dict):
        kind = chosen.get("type")
        function = chosen.get("function", chosen)  # Responses have the name beside the type
        named = function.get("name") if isinstance(function, Mapping) else None
    single = body.get("parallel_tool_calls") is not None and not fields.flag(body, "parallel_tool_calls")
    return wish(kind, named, tools, "tool_choice", single=single, form=form)


def form(value: Any, where: str) -> str:
    """What the policy is told of the form that a request asks for; empty for any text."""
    if value is None:
        return ""
    if not isinstance(value, dict):
        raise BadRequest(f"{where}: expected an object", where)
    match value.get("type"):
        case "text":
            return ""
        case "json_object":
            return _FORM
        case "json_schema":
            described = value.get("json_schema", value)
            schema = described.get("schema") if isinstance(described, Mapping) else None
            return _SCHEMA.format(form=_FORM, schema=fields.written(schema, f"{where}.schema"))
        case kind:
            raise BadRequest(
                f"{where}.type: {kind!r:.60} is not supported; ask for text, json_object or json_schema", where
            )
