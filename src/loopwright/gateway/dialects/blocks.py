"""Anthropic's content blocks to messages of OpenAI's chat format, and its tools to functions."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from loopwright.core.task import Message
from loopwright.gateway.dialects import fields
from loopwright.gateway.dialects.base import BadRequest
from loopwright.gateway.sessions.template import Tool

# Some agents write a number into it that is new in each request, so that no prefix would ever match.
_NONCE = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE | re.IGNORECASE)


def system(value: Any, where: str) -> Iterator[Message]:
    """The system message, if there is anything left of it without the nonce."""
    texts = [_NONCE.sub("", found) for found in _texts(value, where)]
    if content := fields.joined([found for found in texts if found]):
        yield {"role": "system", "content": content}


def said(message: Mapping[str, Any], where: str) -> Iterator[Message]:
    """A message; one of tool results is several."""
    role, content = message.get("role"), message.get("content")
    if content is None:
        raise BadRequest(f"{where}.content: required", f"{where}.content")
    match role:
        case "user":
            yield from _user(content, f"{where}.content")
        case "assistant":
            yield _assistant(content, f"{where}.content")
        case "system":
            yield from system(content, f"{where}.content")
        case _:
            raise BadRequest(f"{where}.role: expected 'user' or 'assistant', got {role!r:.60}", f"{where}.role")


def _user(content: Any, where: str) -> Iterator[Message]:
    """Each tool result is a message of its own, and so is the text before, between and after them."""
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    said: list[str] = []
    answered = False
    for index, block in enumerate(fields.objects(content, where)):
        at = f"{where}.{index}"
        if block.get("type") != "tool_result":
            said.append(_text(block, at))
            continue
        if said:
            yield {"role": "user", "content": fields.joined(said)}
        said, answered = [], True
        asked = fields.text(block.get("tool_use_id"), f"{at}.tool_use_id")
        result = fields.joined(_texts(block.get("content"), f"{at}.content"))
        yield {"role": "tool", "tool_call_id": asked, "content": result}
    if said or not answered:
        yield {"role": "user", "content": fields.joined(said)}


def _assistant(content: Any, where: str) -> Message:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    said, thoughts, calls = [], [], []
    for index, block in enumerate(fields.objects(content, where)):
        at = f"{where}.{index}"
        match block.get("type"):
            case "tool_use":
                arguments = fields.written(block.get("input") or {}, f"{at}.input")
                calls.append(fields.call(block.get("id"), block.get("name"), arguments, at))
            case "thinking":
                thoughts.append(fields.text(block.get("thinking"), f"{at}.thinking"))
            case "redacted_thinking":
                pass  # none of ours, and nobody can read it
            case _:
                said.append(_text(block, at))
    # As it was sampled: the policy's blocks follow upon one another without a gap.
    message: dict[str, Any] = {"role": "assistant", "content": "".join(said)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _texts(content: Any, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_text(block, f"{where}.{index}") for index, block in enumerate(fields.objects(content, where))]


def _text(block: Mapping[str, Any], where: str) -> str:
    if block.get("type") != "text":
        raise fields.refusal(str(block.get("type")), where)
    return fields.text(block.get("text"), f"{where}.text")


def prefill(message: Message) -> str:
    """The text with which the assistant's next turn begins, if the last message is its."""
    if message.get("tool_calls") or message.get("reasoning_content"):
        raise BadRequest("messages: only text can be prefilled; end with a user's message", "messages")
    said = str(message["content"])
    if said != said.rstrip():
        raise BadRequest("messages: what is prefilled cannot end with white space", "messages")
    return said


def tool(tool: Mapping[str, Any], where: str) -> Tool:
    """A tool as a function; those that only Anthropic's own models know are refused."""
    if tool.get("type") not in (None, "custom"):
        kind = str(tool["type"])
        raise BadRequest(f"{where}: {kind!r} is a tool of Anthropic's own; describe it with an input_schema", where)
    return fields.function(tool.get("name"), tool.get("description"), tool.get("input_schema"), where)


def stop(value: Any) -> tuple[str, ...]:
    """The texts that end a turn."""
    if value is not None and not isinstance(value, list):
        raise BadRequest("stop_sequences: expected a list of texts", "stop_sequences")
    return tuple(fields.name(stop, f"stop_sequences.{index}") for index, stop in enumerate(value or ()))
