"""Chat templates: messages to ids, and sampled ids back to a message.

A model's own template is used where its files have one (`model_template.py`). The families here serve models without:
each frames messages in its special tokens and writes tool calls in its own grammar, and `auto` selects the one whose
special tokens the tokenizer has. All of them write reasoning as `<think>…</think>`.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import orjson

from loopwright.core.episode import Node
from loopwright.core.errors import LoopwrightError
from loopwright.core.task import Message
from loopwright.engines.tokenizer import Tokenizer
from loopwright.gateway.sessions.tool_calls import HERMES, JSON, LLAMA3, Grammar, Tool, is_json_object
from loopwright.gateway.sessions.turn_options import PLAIN, TurnOptions
from loopwright.gateway.sessions.turn_parser import END_THINK, THINK, TurnParser, visible_ids

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
_START_IDS = 8
"""Tokens by which most turns are told apart."""
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")


class TemplateError(LoopwrightError, ValueError):
    """The tokenizer lacks special tokens of the template."""


class Continuation(NamedTuple):
    """What the messages of a conversation add, from one of them on up to the policy's next turn."""

    messages: Sequence[Sequence[int]]
    """The ids that each of these messages adds."""
    opening: Sequence[int]
    """The ids between the last message and what the policy samples."""
    options: TurnOptions
    """As requested; the prefill also has the text with which the template itself starts the turn."""
    ends_turn: bool = False
    """Whether it starts with the end of a turn that was cut off."""
    note: str = ""
    """What the template would have written differently, if it had to write the sampled turn before it."""


class ChatTemplate(ABC):
    """How a model reads conversations and writes its turns."""

    grammar: Grammar
    """How it writes tool calls."""
    takes_kwargs = False
    """Whether it uses a request's `chat_template_kwargs`."""
    _tokenizer: Tokenizer
    _ends: frozenset[int]
    """The special tokens that end a turn."""
    _start: Sequence[int]
    """The special token that precedes raw text, if the model has one."""
    latest_turn: tuple[Node | None, str] = None, ""
    """The turn that was sampled last, and its raw text."""

    @abstractmethod
    def begin(self, conversation: Sequence[Message], tools: Sequence[Tool], options: TurnOptions) -> Continuation:
        """A whole conversation."""

    @abstractmethod
    def extend(
        self, conversation: Sequence[Message], start: int, tools: Sequence[Tool], options: TurnOptions, turn: Node
    ) -> Continuation | None:
        """What the messages from `start` on add after `turn`, the sampled message before them.

        None if the template writes what precedes them differently than before.
        """

    def plain(self, text: str | Sequence[int]) -> list[int]:
        """The ids of raw text, or of ids: without role and end."""
        return [*self._start, *self._tokenizer.encode(text)] if isinstance(text, str) else list(text)

    def parser(
        self, *, call_id: str, stop: Sequence[str] = (), raw: bool = False, options: TurnOptions = PLAIN
    ) -> TurnParser:
        """A parser for one sampled message."""
        return TurnParser(
            self._tokenizer,
            self._control_ids,
            call_id=call_id,
            stop=stop,
            raw=raw,
            grammar=self.grammar,
            options=options,
        )

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        """The special tokens that are not text: all but those that mark reasoning and tool calls."""
        marks = (THINK, END_THINK, self.grammar.open, self.grammar.close)
        return frozenset(number for name, number in self._tokenizer.specials.items() if name not in marks)

    def raw_text(self, turn: Node) -> str:
        """What was sampled of a turn, as text: without its end, but with its reasoning, calls and stop string."""
        if turn is self.latest_turn[0]:
            return self.latest_turn[1]
        sampled = turn.ids[len(turn.ids) - turn.sampled :]
        return self._tokenizer.decode(visible_ids(sampled, self._control_ids))

    def start_of(self, turn: Node) -> str:
        """How its raw text starts, without white space around it."""
        ids = visible_ids(turn.ids[len(turn.ids) - turn.sampled :][:_START_IDS], self._control_ids)
        return self._tokenizer.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}").strip()

    def text_added(self, message: Message, turn: Node) -> str:
        """What an agent has added to a turn that was cut off, or ended by a stop string, when it sends it back."""
        raw = "" if turn.ids[-1] in self._ends else self.raw_text(turn)
        return text.removeprefix(raw) if raw and (text := text_of(message)).startswith(raw) else ""


class FamilyTemplate(ChatTemplate):
    """How a model family writes conversations: special tokens around each message, which a subclass defines.

    Ids of later messages never change those of earlier ones.
    """

    name = ""
    required_tokens: tuple[str, ...] = ()
    end_tokens: tuple[str, ...] = ()
    """Special tokens that end a turn; the first one is added where it is missing."""
    start_token = ""
    """The special token that precedes the whole conversation."""
    role_names: Mapping[str, str] = {}
    """The family's names for roles, where they differ from OpenAI's."""
    default_grammar = HERMES
    separator = ""
    """Text after the end of each message."""

    def __init__(self, tokenizer: Tokenizer, grammar: Grammar | None = None) -> None:
        specials = tokenizer.specials
        if missing := [name for name in self.required_tokens if name not in specials]:
            raise TemplateError(
                f"template {self.name!r} needs the special tokens {', '.join(missing)}, which this tokenizer lacks. "
                f"It has {', '.join(sorted(specials)[:20]) or 'none'}; choose another template, or `auto`."
            )
        self._encode, self._tokenizer = tokenizer.encode, tokenizer
        self.grammar = grammar or self.default_grammar
        ends = [specials[name] for name in self.end_tokens if name in specials]
        self.end_id, self._ends = ends[0], frozenset(ends)
        self._start = [specials[self.start_token]] if self.start_token in specials else []
        self._separator = self._encode(self.separator) if self.separator else []
        self._headers: dict[str, tuple[list[int], str]] = {}
        header, lead = self._header("assistant")
        self._turn_header = [*header, *self._encode(lead)]

    @abstractmethod
    def _header(self, role: str) -> tuple[list[int], str]:
        """The ids before a message, and the text before its own text: both texts are tokenised together."""

    def render(self, message: Message, *, first: bool, tools: Sequence[Tool]) -> list[int]:
        """The ids that a message adds; the first message of a conversation also carries the tools."""
        ids = list(self._start) if first else []
        if first and tools:
            tools_json = "\n".join(orjson.dumps(tool).decode() for tool in tools)
            description = _TOOLS.format(tools=tools_json, how=_HOW[self.grammar])
            if message["role"] == "system":
                message = {**message, "content": f"{text_of(message)}\n\n{description}"}
            else:
                ids += self._frame("system", description)
        text = text_of(message)
        if reasoning := message.get("reasoning_content"):
            text = f"{THINK}\n{reasoning}\n{END_THINK}\n\n{text}"
        if message.get("tool_calls"):
            for index, (name, arguments) in enumerate(calls_of(message)):
                gap = "\n" if self.grammar.close or (text and not index) else "; " if index else ""
                text += gap + self.grammar.write(name, arguments)
        return ids + self._frame(str(message["role"]), text)

    def _frame(self, role: str, text: str) -> list[int]:
        if (header := self._headers.get(role)) is None:
            header = self._headers[role] = self._header(self.role_names.get(role, role))
        return [*header[0], *self._encode(header[1] + text), self.end_id, *self._separator]

    def opening(self, options: TurnOptions = PLAIN) -> list[int]:
        """The ids before what the policy samples."""
        ids = self._frame("system", options.instruction) if options.instruction else []
        return [*ids, *self._turn_header, *(self._encode(options.prefill) if options.prefill else ())]

    def begin(self, conversation: Sequence[Message], tools: Sequence[Tool], options: TurnOptions) -> Continuation:
        rendered = [
            self.render(message, first=not index, tools=() if index else tools)
            for index, message in enumerate(conversation)
        ]
        return Continuation(rendered, self.opening(options), options)

    def extend(
        self, conversation: Sequence[Message], start: int, tools: Sequence[Tool], options: TurnOptions, turn: Node
    ) -> Continuation:
        closing = list(self._separator)
        if is_cut := turn.ids[-1] not in self._ends or not turn.sampled:
            closing = [*self._encode(self.text_added(conversation[start - 1], turn)), self.end_id, *closing]
        rendered = [self.render(message, first=False, tools=()) for message in conversation[start:]]
        opening = self.opening(options)
        if rendered:
            rendered[0] = [*closing, *rendered[0]]
        else:
            opening = [*closing, *opening]
        return Continuation(rendered, opening, options, ends_turn=is_cut)


class ChatML(FamilyTemplate):
    """`<|im_start|>role … <|im_end|>`, as Qwen and SmolLM2 write it."""

    name, required_tokens, end_tokens = "chatml", ("<|im_start|>", "<|im_end|>"), ("<|im_end|>",)
    separator = "\n"

    def _header(self, role: str) -> tuple[list[int], str]:
        return [self._tokenizer.specials["<|im_start|>"]], f"{role}\n"


class Llama3(FamilyTemplate):
    """`<|start_header_id|>role<|end_header_id|> … <|eot_id|>`; tool results have the role `ipython`."""

    name, required_tokens = "llama3", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    end_tokens, start_token = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), "<|begin_of_text|>"
    default_grammar, role_names = LLAMA3, {"tool": "ipython"}

    def _header(self, role: str) -> tuple[list[int], str]:
        specials = self._tokenizer.specials
        return [specials["<|start_header_id|>"], *self._encode(role), specials["<|end_header_id|>"]], "\n\n"


class PlainText(FamilyTemplate):
    """`### role` as plain text, for tokenizers without role tokens; only the end of a message is a special token."""

    name, default_grammar, separator = "json", JSON, "\n"

    def __init__(self, tokenizer: Tokenizer, grammar: Grammar | None = None) -> None:
        self.end_tokens = tuple(name for name in _END_TOKENS if name in tokenizer.specials)
        self.required_tokens = self.end_tokens or _END_TOKENS[:1]
        self.start_token = next((name for name in ("<s>", "<bos>") if name in tokenizer.specials), "")
        super().__init__(tokenizer, grammar)

    def _header(self, role: str) -> tuple[list[int], str]:
        return [], f"### {role}\n"


def family_of(name: str, tokenizer: Tokenizer) -> FamilyTemplate:
    """The family of this name; TemplateError if the tokenizer lacks its special tokens.

    `json` frames messages as the tokenizer's family does, and writes calls without marks.
    """
    for family in (ChatML, Llama3):
        if name == family.name:
            return family(tokenizer)
        if name in ("auto", "json") and all(token in tokenizer.specials for token in family.required_tokens):
            return family(tokenizer, JSON if name == "json" else None)
    return PlainText(tokenizer)


def text_of(message: Message) -> str:
    """The text of a message, whose content may be a list of parts."""
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return content or ""
    parts = list(content) if isinstance(content, Sequence) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if None in texts:
        raise ValueError("only text is supported; a message contains something else")
    return "".join(str(text) for text in texts)


def calls_of(message: Message) -> list[tuple[str, Any]]:
    """Name and arguments of each tool call of a message; arguments that are JSON are parsed."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError("a tool call needs a `function` with its `name` and `arguments`")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str) and is_json_object(arguments):
            arguments = json.loads(arguments)
        calls.append((function["name"], arguments))
    return calls


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many elements two texts, or two sequences of ids, start with alike, by halving."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
