"""The items and tools of a Responses request, as messages and tools in OpenAI's chat format.

A custom tool takes text: the policy sees a function with the argument `input`. Tools of a namespace are functions whose
names start with it. What the policy calls is written back as the client described it (`ToolOrigin`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from loopwright.core.task import Message
from loopwright.gateway.dialects import fields
from loopwright.gateway.dialects.fields import BadRequest
from loopwright.gateway.sessions.tool_calls import Tool, is_json_object

_TEXT_TYPES = ("input_text", "output_text", "text")
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
Item = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolOrigin:
    """How a client described a tool that is not a plain function."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


# -- tools ----------------------------------------------------------------------------------------------------------


def parse_tools(tools: Sequence[Item]) -> tuple[list[Tool], dict[str, ToolOrigin], dict[str, Any]]:
    """The tools that the policy sees, the origin of those that are not plain functions, and what is ignored."""
    functions: list[Tool] = []
    origins: dict[str, ToolOrigin] = {}
    ignored: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        where, kind = f"tools.{index}", tool.get("type")
        if kind in ("function", "custom"):
            _add(tool, None, where, functions, origins)
        elif kind == "namespace":
            name = fields.non_empty_text(tool.get("name"), f"{where}.name")
            for number, each in enumerate(fields.objects(tool.get("tools"), f"{where}.tools")):
                _add(each, name, f"{where}.tools.{number}", functions, origins)
        else:  # it would run on OpenAI's servers
            ignored[f"tools.{fields.non_empty_text(kind, f'{where}.type')}"] = "a hosted tool"
    return functions, origins, ignored


def _add(tool: Item, namespace: str | None, where: str, functions: list[Tool], origins: dict[str, ToolOrigin]) -> None:
    own_name = fields.non_empty_text(tool.get("name"), f"{where}.name")
    name, description, is_custom = full_name(namespace, own_name), tool.get("description"), False
    match tool.get("type"):
        case "function":
            function = fields.function(name, description, tool.get("parameters"), where)
        case "custom":
            is_custom, text = True, fields.text(description or "", f"{where}.description")
            format = tool.get("format")
            if isinstance(format, Mapping) and format.get("type") == "grammar":  # nothing else constrains the input
                text += f"\n\nThe input has to match this {format.get('syntax')} grammar:\n{format.get('definition')}"
            function = fields.function(name, text, _INPUT, where)
        case kind:
            raise BadRequest(f"{where}: {str(kind)!r} is not supported in a namespace", f"{where}.type")
    functions.append(function)
    if namespace is not None or is_custom:
        origins[name] = ToolOrigin(own_name, namespace, is_custom)


def full_name(namespace: Any, name: Any) -> Any:
    """The name under which the policy knows a tool."""
    return name if not namespace else f"{str(namespace).removesuffix('__')}__{name}"


def custom_input(arguments: str) -> tuple[str, bool]:
    """The text for a custom tool, and whether the policy wrote it completely."""
    if is_json_object(arguments) and isinstance(text := orjson.loads(arguments).get("input"), str):
        return text, True
    return arguments, False


# -- items ----------------------------------------------------------------------------------------------------------


def parse_items(items: Sequence[Item], where: str, find: Callable[[str, str], Item]) -> list[Message]:
    """The messages of items; `find` returns the item that an `item_reference` names."""
    messages: list[Message] = []
    turn = _TurnItems()
    for index, item in enumerate(items):
        at = f"{where}.{index}"
        if kind_of(item) == "item_reference":
            item = find(fields.text(item.get("id"), f"{at}.id"), at)
        if not turn.add(item, at):
            messages += turn.take()
            messages.append(_message_of(item, at))
    return [*messages, *turn.take()]


class _TurnItems:
    """Consecutive items of the policy, combined into messages: one for each turn."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._last = ""

    def add(self, item: Item, where: str) -> bool:
        """Add an item; False if it is not the policy's."""
        kind = kind_of(item)
        if kind == "message" and item.get("role") == "assistant":
            # Two texts in a row are two turns: a turn has its text in one piece, or around its calls.
            message = self._message(new=self._last == "message")
            message["content"] += "".join(_texts(item.get("content"), f"{where}.content"))
        elif kind in ("function_call", "custom_tool_call"):
            if kind == "custom_tool_call":
                arguments = fields.to_json({"input": fields.text(item.get("input"), f"{where}.input")}, where)
            else:
                arguments = fields.text(item.get("arguments") or "{}", f"{where}.arguments")
            name = full_name(item.get("namespace"), item.get("name"))
            call = fields.tool_call(item.get("call_id"), name, arguments, where)
            self._message().setdefault("tool_calls", []).append(call)
        elif kind == "reasoning":
            message = self._message(new=self._last in ("message", "function_call", "custom_tool_call"))
            parts = fields.objects(item.get("content"), f"{where}.content")
            texts = [fields.text(part.get("text"), f"{where}.content.{index}") for index, part in enumerate(parts)]
            if any(texts):
                message["reasoning_content"] = message.get("reasoning_content", "") + "".join(texts)
        else:
            return False
        self._last = kind
        return True

    def take(self) -> list[Message]:
        """The messages so far; what follows is another turn."""
        messages, self._messages, self._last = self._messages, [], ""
        return list(messages)

    def _message(self, *, new: bool = False) -> dict[str, Any]:
        if new or not self._messages:
            self._messages.append({"role": "assistant", "content": ""})
        return self._messages[-1]


def kind_of(item: Item) -> str:
    """The type of an item."""
    return str(item.get("type") or ("message" if "role" in item else "item_reference"))


def _message_of(item: Item, where: str) -> Message:
    """The message of an item that is not the policy's."""
    match kind_of(item), item.get("role"):
        case "message", ("user" | "system" | "developer") as role:
            content = fields.join_blocks(_texts(item.get("content"), f"{where}.content"))
            return {"role": "user" if role == "user" else "system", "content": content}
        case "message", role:
            expected = "'user', 'assistant', 'system' or 'developer'"
            raise BadRequest(f"{where}.role: expected {expected}, got {role!r:.60}", f"{where}.role")
        case (("function_call_output" | "custom_tool_call_output"), _):
            output = fields.join_blocks(_texts(item.get("output"), f"{where}.output"))
            call_id = fields.text(item.get("call_id"), f"{where}.call_id")
            return {"role": "tool", "tool_call_id": call_id, "content": output}
        case kind, _:
            raise fields.unsupported_content(kind, where)


def _texts(content: Any, where: str) -> list[str]:
    if content is None:
        raise BadRequest(f"{where}: required", where)
    if isinstance(content, str):
        return [content]
    texts = []
    for index, part in enumerate(fields.objects(content, where)):
        kind = part.get("type")
        if kind != "refusal" and kind not in _TEXT_TYPES:
            raise fields.unsupported_content(str(kind), f"{where}.{index}")
        name = "refusal" if kind == "refusal" else "text"
        texts.append(fields.text(part.get(name), f"{where}.{index}.{name}"))
    return texts
