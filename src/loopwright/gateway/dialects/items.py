"""The items of OpenAI's Responses to messages of its chat format, and its tools to functions."""

from collections.abc import Mapping
from typing import Any

from loopwright.core.task import Message
from loopwright.gateway.dialects import fields
from loopwright.gateway.dialects.base import BadRequest
from loopwright.gateway.sessions.template import Tool

_TEXTS = ("input_text", "output_text", "text")
_STORED = {
    "previous_response_id": "no response is kept to go on from; send the whole conversation as `input`",
    "conversation": "no conversation is kept; send the whole conversation as `input`",
    "prompt": "no prompt is kept; send it as `instructions` and `input`",
    "background": "a response is sampled while its client waits; stream it",
}


def check_stateless(body: Mapping[str, Any]) -> None:
    """BadRequest if the answer would depend on what the server keeps: an agent would go on without its history."""
    for field, reason in _STORED.items():
        if body.get(field):
            raise BadRequest(f"{field}: not supported: {reason}", field)


def messages(body: Mapping[str, Any]) -> list[Message]:
    """The conversation: instructions, then the items of the input. What the policy said in one turn is one message."""
    found: list[Message] = []
    if (instructions := body.get("instructions")) is not None:
        found.append({"role": "system", "content": fields.text(instructions, "instructions")})
    given = body.get("input")
    if isinstance(given, str):
        return [*found, {"role": "user", "content": given}]
    speech = _Speech()
    for index, item in enumerate(fields.objects(given, "input")):
        where = f"input.{index}"
        if speech.takes(item, where):
            continue
        found += speech.taken()
        found.append(_heard(item, where))
    return found + speech.taken()


def tool(tool: Mapping[str, Any], where: str) -> Tool:
    """A tool as a function; those that OpenAI's servers run are refused."""
    if tool.get("type") != "function":
        kind = str(tool.get("type"))
        raise BadRequest(f"{where}: {kind!r} is not supported: only functions can be called", f"{where}.type")
    return fields.function(tool.get("name"), tool.get("description"), tool.get("parameters"), where)


class _Speech:
    """What the policy said, put together from items that follow upon one another."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._last = ""

    def takes(self, item: Mapping[str, Any], where: str) -> bool:
        """Take an item in, if the policy said it."""
        kind = _kind(item)
        if kind == "message" and item.get("role") == "assistant":
            # Text upon text is two turns: one turn has its text in one piece, or around its calls.
            message = self._message(new=self._last == "message")
            message["content"] += "".join(_texts(item.get("content"), f"{where}.content"))
        elif kind == "function_call":
            arguments = fields.text(item.get("arguments") or "{}", f"{where}.arguments")
            call = fields.call(item.get("call_id"), item.get("name"), arguments, where)
            self._message().setdefault("tool_calls", []).append(call)
        elif kind == "reasoning":
            message = self._message(new=self._last in ("message", "function_call"))
            thought = _thought(item, where)
            if thought:
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
        else:
            return False
        self._last = kind
        return True

    def taken(self) -> list[Message]:
        """The messages so far; what follows is another turn."""
        messages, self._messages, self._last = self._messages, [], ""
        return list(messages)

    def _message(self, *, new: bool = False) -> dict[str, Any]:
        if new or not self._messages:
            self._messages.append({"role": "assistant", "content": ""})
        return self._messages[-1]


def _kind(item: Mapping[str, Any]) -> str:
    return str(item.get("type") or ("message" if "role" in item else "item_reference"))


def _heard(item: Mapping[str, Any], where: str) -> Message:
    """A message that is not the policy's."""
    match _kind(item), item.get("role"):
        case "message", ("user" | "system" | "developer") as role:
            content = fields.joined(_texts(item.get("content"), f"{where}.content"))
            return {"role": "user" if role == "user" else "system", "content": content}
        case "message", role:
            expected = "'user', 'assistant', 'system' or 'developer'"
            raise BadRequest(f"{where}.role: expected {expected}, got {role!r:.60}", f"{where}.role")
        case "function_call_output", _:
            output = fields.joined(_texts(item.get("output"), f"{where}.output"))
            return {
                "role": "tool",
                "tool_call_id": fields.text(item.get("call_id"), f"{where}.call_id"),
                "content": output,
            }
        case "item_reference", _:
            raise BadRequest(f"{where}: no items are kept to refer to; send the item itself", where)
        case kind, _:
            raise fields.refusal(kind, where)


def _texts(content: Any, where: str) -> list[str]:
    if content is None:
        raise BadRequest(f"{where}: required", where)
    if isinstance(content, str):
        return [content]
    return [_text(part, f"{where}.{index}") for index, part in enumerate(fields.objects(content, where))]


def _text(part: Mapping[str, Any], where: str) -> str:
    kind = part.get("type")
    if kind == "refusal":
        return fields.text(part.get("refusal"), f"{where}.refusal")
    if kind not in _TEXTS:
        raise fields.refusal(str(kind), where)
    return fields.text(part.get("text"), f"{where}.text")


def _thought(item: Mapping[str, Any], where: str) -> str:
    parts = fields.objects(item.get("content"), f"{where}.content")
    return "".join(fields.text(part.get("text"), f"{where}.content.{index}") for index, part in enumerate(parts))
