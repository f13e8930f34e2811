"""Chat templates: messages to ids, a message at a time, and sampled ids back to a message.

A family frames messages in its own special tokens and writes tool calls by its own grammar. `auto` takes the family of
which the tokenizer has the special tokens. Reasoning is written as `<think>…</think>` by all of them.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from loopwright.core.errors import LoopwrightError
from loopwright.core.task import Message
from loopwright.engines.tokenizer import Tokenizer
from loopwright.gateway.sessions.calls import HERMES, JSON, LLAMA3, Grammar, is_object
from loopwright.gateway.sessions.manner import PLAIN, Manner
from loopwright.gateway.sessions.reader import THINK, THOUGHT, TurnParser

Tool = Mapping[str, Any]
"""A tool as OpenAI describes it: {"type": "function", "function": {"name", "description", "parameters"}}."""

_TOOLS = """# Tools

You may call one or more functions. They are described here, one JSON object per line:
<tools>
{tools}
</tools>

{how}"""
_HOW = {
    HERMES: """For each call write a JSON object with its name and arguments inside tags of its own:
<tool_call>
{"name": "…", "arguments": {…}}
</tool_call>""",
    LLAMA3: """To call a function, answer with a JSON object of its name and arguments and nothing else:
{"name": "…", "parameters": {…}}""",
    JSON: """To call a function, answer with a JSON object of its name and arguments and nothing else:
{"name": "…", "arguments": {…}}""",
}
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")


class TemplateError(LoopwrightError, ValueError):
    """A tokenizer that lacks the special tokens of a template."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A sampled message, and the calls in it that nobody can read."""

    message: Message
    malformed: tuple[str, ...] = ()


class ChatTemplate(Protocol):
    """How a family of models writes conversations. Ids of later messages never change those of earlier ones."""

    end_id: int
    grammar: Grammar

    def render(self, message: Message, *, first: bool, tools: Sequence[Tool]) -> list[int]:
        """The ids that a message adds; the first one of a conversation also carries the tools."""
        ...

    def opening(self, manner: Manner = PLAIN) -> list[int]:
        """The ids after which the policy speaks."""
        ...

    def closing(self, sampled: Sequence[int]) -> list[int]:
        """The ids that follow a sampled message, its missing end included where it was cut off."""
        ...

    def plain(self, text: str | Sequence[int]) -> list[int]:
        """The ids of raw text, or of ids: neither role nor end."""
        ...

    def reader(
        self, *, call_id: str, stop: Sequence[str] = (), raw: bool = False, manner: Manner = PLAIN
    ) -> TurnParser:
        """What reads the message that sampled ids stand for."""
        ...


class Framed(ABC):
    """A template that puts special tokens around each message. A family says which."""

    name = ""
    needs: tuple[str, ...] = ()
    """The special tokens without which it cannot be written."""
    ends: tuple[str, ...] = ()
    """Those that end a turn; the first one is added where it is missing."""
    begins = ""
    """The one that stands once, before everything else."""
    roles: Mapping[str, str] = {}
    """The family's words for roles, where they are its own."""

    def __init__(self, tokenizer: Tokenizer, grammar: Grammar | None = None) -> None:
        specials = tokenizer.specials
        if missing := [name for name in self.needs if name not in specials]:
            raise TemplateError(
                f"template {self.name!r} needs the special tokens {', '.join(missing)}, which this tokenizer lacks. "
                f"It has {', '.join(sorted(specials)[:20]) or 'none'}; choose another template, or `auto`."
            )
        self._encode, self._tokenizer = tokenizer.encode, tokenizer
        self.grammar = grammar or self.own
        ends = [specials[name] for name in self.ends if name in specials]
        self.end_id, self._ends = ends[0], frozenset(ends)
        self._begin = [specials[self.begins]] if self.begins in specials else []
        self._after = self._encode(self.after) if self.after else []
        begun, lead = self._open("assistant")
        self._opened = [*begun, *self._encode(lead)]

    own = HERMES
    after = ""
    """Text after the end of each message."""

    @abstractmethod
    def _open(self, role: str) -> tuple[list[int], str]:
        """The ids before a message, and the text before its own: both texts are tokenised as one."""

    def render(self, message: Message, *, first: bool, tools: Sequence[Tool]) -> list[int]:
        ids = list(self._begin) if first else []
        if first and tools:
            listed = "\n".join(orjson.dumps(tool).decode() for tool in tools)
            described = _TOOLS.format(tools=listed, how=_HOW[self.grammar])
            if message["role"] == "system":
                message = {**message, "content": f"{text_of(message)}\n\n{described}"}
            else:
                ids += self._wrapped("system", described)
        return ids + self._wrapped(str(message["role"]), self._written(message))

    def _wrapped(self, role: str, text: str) -> list[int]:
        begun, lead = self._open(self.roles.get(role, role))
        return [*begun, *self._encode(lead + text), self.end_id, *self._after]

    def _written(self, message: Message) -> str:
        text = text_of(message)
        if thought := message.get("reasoning_content"):
            text = f"{THINK}\n{thought}\n{THOUGHT}\n\n{text}"
        for index, (name, arguments) in enumerate(calls_of(message)):
            gap = "\n" if self.grammar.close or (text and not index) else "; " if index else ""
            text += gap + self.grammar.written(name, arguments)
        return text

    def opening(self, manner: Manner = PLAIN) -> list[int]:
        ids = self._wrapped("system", manner.note) if manner.note else []
        return [*ids, *self._opened, *(self._encode(manner.given) if manner.given else ())]

    def closing(self, sampled: Sequence[int]) -> list[int]:
        return [*([] if sampled and sampled[-1] in self._ends else [self.end_id]), *self._after]

    def plain(self, text: str | Sequence[int]) -> list[int]:
        return [*self._begin, *self._encode(text)] if isinstance(text, str) else list(text)

    def parse(self, ids: Sequence[int], *, call_id: str, stop: Sequence[str] = ()) -> Parsed:
        """The message that sampled ids stand for."""
        reader = self.reader(call_id=call_id, stop=stop)
        reader.whole(ids)
        return Parsed(reader.message, reader.malformed)

    def reader(
        self, *, call_id: str, stop: Sequence[str] = (), raw: bool = False, manner: Manner = PLAIN
    ) -> TurnParser:
        return TurnParser(
            self._tokenizer, self._ends, call_id=call_id, stop=stop, raw=raw, grammar=self.grammar, manner=manner
        )


class ChatML(Framed):
    """`<|im_start|>role … <|im_end|>`, as Qwen and SmolLM2 write it."""

    name, needs, ends = "chatml", ("<|im_start|>", "<|im_end|>"), ("<|im_end|>",)
    after = "\n"

    def _open(self, role: str) -> tuple[list[int], str]:
        return [self._tokenizer.specials["<|im_start|>"]], f"{role}\n"


class Llama3(Framed):
    """`<|start_header_id|>role<|end_header_id|> … <|eot_id|>`; what tools say has the role `ipython`."""

    name, needs = "llama3", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    ends, begins = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), "<|begin_of_text|>"
    own, roles = LLAMA3, {"tool": "ipython"}

    def _open(self, role: str) -> tuple[list[int], str]:
        specials = self._tokenizer.specials
        return [specials["<|start_header_id|>"], *self._encode(role), specials["<|end_header_id|>"]], "\n\n"


class Unframed(Framed):
    """`### role` as plain text, for tokenizers that know of no roles; only the end of a message is a special token."""

    name, own, after = "json", JSON, "\n"

    def __init__(self, tokenizer: Tokenizer, grammar: Grammar | None = None) -> None:
        self.ends = tuple(name for name in _ENDS if name in tokenizer.specials)
        self.needs = self.ends or _ENDS[:1]
        self.begins = next((name for name in ("<s>", "<bos>") if name in tokenizer.specials), "")
        super().__init__(tokenizer, grammar)

    def _open(self, role: str) -> tuple[list[int], str]:
        return [], f"### {role}\n"


def template_of(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    """The template of this name; TemplateError if the tokenizer cannot write it.

    `json` frames messages as the tokenizer's family does, and has calls without marks.
    """
    for family in (ChatML, Llama3):
        if name == family.name:
            return family(tokenizer)
        if name in ("auto", "json") and all(each in tokenizer.specials for each in family.needs):
            return family(tokenizer, JSON if name == "json" else None)
    return Unframed(tokenizer)


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
        if isinstance(arguments, str) and is_object(arguments):
            arguments = json.loads(arguments)
        found.append((function["name"], arguments))
    return found
