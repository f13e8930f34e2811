"""Chat templates: messages to ids, a message at a time, and sampled ids back to a message.

Tool calls are written as Hermes and Qwen do: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from loopwright.core.task import Message
from loopwright.engines.tokenizer import Tokenizer
from loopwright.gateway.reader import Reader

Tool = Mapping[str, Any]
"""A tool as OpenAI describes it: {"type": "function", "function": {"name", "description", "parameters"}}."""

_TOOLS = """# Tools

You may call one or more functions. They are described here, one JSON object per line:
<tools>
{tools}
</tools>

For each call write a JSON object with its name and arguments inside tags of its own:
<tool_call>
{{"name": "…", "arguments": {{…}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A sampled message, and the calls in it that nobody can read."""

    message: Message
    malformed: tuple[str, ...] = ()


class Template(Protocol):
    """How a family of models writes conversations. Ids of later messages never change those of earlier ones."""

    end_id: int

    def render(self, message: Message, *, first: bool, tools: Sequence[Tool]) -> list[int]:
        """The ids that a message adds; the first one of a conversation also carries the tools."""
        ...

    def opening(self) -> list[int]:
        """The ids after which the policy speaks."""
        ...

    def closing(self, sampled: Sequence[int]) -> list[int]:
        """The ids that follow a sampled message, its missing end included where it was cut off."""
        ...

    def plain(self, text: str | Sequence[int]) -> list[int]:
        """The ids of raw text, or of ids: neither role nor end."""
        ...

    def reader(self, *, call_id: str, stop: Sequence[str] = (), raw: bool = False) -> Reader:
        """What reads the message that sampled ids stand for."""
        ...


class ChatML:
    """`<|im_start|>role … <|im_end|>`, as Qwen and SmolLM2 write it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._start = tokenizer.specials["<|im_start|>"]
        self.end_id = tokenizer.specials["<|im_end|>"]
        self._newline = tokenizer.encode("\n")
        self._opening = [self._start, *tokenizer.encode("assistant\n")]

    def render(self, message: Message, *, first: bool, tools: Sequence[Tool]) -> list[int]:
        ids = []
        if first and tools:
            described = _TOOLS.format(tools="\n".join(orjson.dumps(tool).decode() for tool in tools))
            if message["role"] == "system":
                message = {**message, "content": f"{text_of(message)}\n\n{described}"}
            else:
                ids = self._wrapped("system", described)
        return ids + self._wrapped(str(message["role"]), _written(message))

    def _wrapped(self, role: str, text: str) -> list[int]:
        return [self._start, *self._tokenizer.encode(f"{role}\n{text}"), self.end_id, *self._newline]

    def opening(self) -> list[int]:
        return list(self._opening)

    def closing(self, sampled: Sequence[int]) -> list[int]:
        return [*([] if sampled and sampled[-1] == self.end_id else [self.end_id]), *self._newline]

    def plain(self, text: str | Sequence[int]) -> list[int]:
        return self._tokenizer.encode(text) if isinstance(text, str) else list(text)

    def parse(self, ids: Sequence[int], *, call_id: str, stop: Sequence[str] = ()) -> Parsed:
        """The message that sampled ids stand for."""
        reader = self.reader(call_id=call_id, stop=stop)
        reader.whole(ids)
        return Parsed(reader.message, reader.malformed)

    def reader(self, *, call_id: str, stop: Sequence[str] = (), raw: bool = False) -> Reader:
        return Reader(self._tokenizer, self.end_id, call_id=call_id, stop=stop, raw=raw)


def text_of(message: Message) -> str:
    """The text of a message, whose content may be a list of parts."""
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return content or ""
    parts = list(content) if isinstance(content, Sequence) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if None in texts:
        raise ValueError("only text can be shown to this model; a message holds something else")
    return "".join(str(text) for text in texts)


def calls_of(message: Message) -> list[tuple[str, Any]]:
    """Name and arguments of each tool call of a message; arguments that are JSON are read."""
    found = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError("a tool call needs a `function` with its `name` and `arguments`")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        found.append((function["name"], arguments))
    return found


def _written(message: Message) -> str:
    text = text_of(message)
    for name, arguments in calls_of(message):
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        text += f"\n<tool_call>\n{body}\n</tool_call>"
    return text
