"""The model's own chat template, rendered a turn at a time and spliced with what was sampled.

A Jinja template renders whole conversations, and an agent's turn must not cost what all turns before it cost. What
follows a turn does not depend on the middle of the conversation, so a window is rendered: the messages up to the first
of the user, the turn with a few messages before it, and what follows it. Each rendering has to start as the first one
did: a template that changes what it wrote before is rendered from the start, which makes a separate branch. The window
of a turn usually starts with that of the previous turn, so that one rendering is enough.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

from loopwright.core.episode import Node
from loopwright.core.task import Message
from loopwright.engines.chat_template import ChatTemplateSource, RenderError, SpecialTokens, unprotected
from loopwright.engines.tokenizer import Tokenizer
from loopwright.gateway.sessions.template import (
    ChatTemplate,
    Continuation,
    TemplateError,
    common_prefix,
    family_of,
    text_of,
)
from loopwright.gateway.sessions.tool_calls import HERMES, JSON, LLAMA3, Grammar, Tool, is_json_object
from loopwright.gateway.sessions.turn_options import TurnOptions
from loopwright.gateway.sessions.turn_parser import END_THINK, THINK

log = logging.getLogger(__name__)
_MAX_CUTS = 8
"""Messages of one continuation whose ids are told apart; of more, only the first and the last."""
_MAX_WINDOW = 8
"""Messages between the first ones and a turn that are rendered again; after that the window starts later."""
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<end_of_turn>")
_OPEN_REASONING = re.compile(rf"{THINK}\s*$")
_PROBE = "zq7"
_PROBE_CALL = {"id": "call00000", "type": "function", "function": {"name": _PROBE, "arguments": {_PROBE: _PROBE}}}
_PROBE_TOOL = {"type": "function", "function": {"name": _PROBE, "parameters": {"type": "object", "properties": {}}}}
_HELLO = "hello"
_USER: Message = {"role": "user", "content": _HELLO}


_Context = tuple[Sequence[Tool], Mapping[str, Any]]
"""Tools, and the client's arguments for the template."""


class _Facts:
    """What is known of a tokenizer's template: its special tokens, the ends of turns, and how it writes calls."""

    def __init__(self, tokenizer: Tokenizer, source: ChatTemplateSource) -> None:
        self.specials = SpecialTokens(tokenizer)
        turn = {"role": "assistant", "content": _PROBE}
        text = source.render([_USER, turn, _USER], opens_turn=True)
        self.has_parts = _PROBE not in text
        """Whether a message's content is a list of parts."""
        if self.has_parts:
            text = source.render([_with_parts(each) for each in (_USER, turn, _USER)], opens_turn=True)
        end = self.specials.find(text, frozenset(tokenizer.specials), text.find(_PROBE))
        if _PROBE not in text or end is None or _HELLO in text[text.find(_PROBE) : end.start()]:
            raise TemplateError("it does not end the assistant's messages with a special token")
        names = {str(end[1]), source.tokens.get("eos_token", ""), *_ENDS}
        self.ends = frozenset(name for name in names if name in tokenizer.specials)
        try:
            family = family_of("auto", tokenizer)
            self.start, self.grammar = family.plain(""), family.grammar
        except TemplateError:
            self.start, self.grammar = [], JSON
        self.grammar = _grammar(source) or self.grammar


def _grammar(source: ChatTemplateSource) -> Grammar | None:
    """How the template writes calls; None if it writes none, or in a form that is not parsed here."""
    calls = {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}
    try:
        text = source.render([_USER, calls], [_PROBE_TOOL], opens_turn=False)
    except RenderError:
        return None
    call = text[text.rfind(_HELLO) :]
    if f'{{"name": "{_PROBE}", "parameters"' in call:
        return LLAMA3
    if f'{{"name": "{_PROBE}", "arguments"' in call:
        return HERMES if HERMES.open in call else JSON
    if _PROBE in call:
        log.warning("the model's chat template writes tool calls in a form that is not parsed here: they stay text")
    return None


def _with_parts(message: Message) -> Message:
    """A message whose content is a list of parts, for templates that know no other."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


_facts: "WeakKeyDictionary[Tokenizer, _Facts]" = WeakKeyDictionary()


def template_of(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    """The template of this name: `auto` is the model's own where it has one, and the family of its tokens otherwise."""
    source = getattr(tokenizer, "chat_template", None)
    if name == "auto" and source is not None:
        try:
            return ModelTemplate(tokenizer, source)
        except (RenderError, TemplateError) as error:
            log.warning("the model's own chat template cannot be used, and its family's is: %s", error)
    return family_of(name, tokenizer)


class ModelTemplate(ChatTemplate):
    """A Jinja template from the model's files. Each session has its own."""

    takes_kwargs = True

    def __init__(self, tokenizer: Tokenizer, source: ChatTemplateSource) -> None:
        if tokenizer not in _facts:
            _facts[tokenizer] = _Facts(tokenizer, source)
        facts = _facts[tokenizer]
        self._tokenizer, self._source, self._specials = tokenizer, source, facts.specials
        self.grammar, self._end_names = facts.grammar, facts.ends
        self._ends = frozenset(tokenizer.specials[name] for name in facts.ends)
        self._names = {tokenizer.specials[name]: name for name in facts.ends}
        self._start, self._has_parts = facts.start, facts.has_parts
        self._head: tuple[Sequence[Message], _Context, list[Message], tuple[str, ...]] = [], ([], {}), [], ()
        """The first messages of a conversation, what they were rendered with, as prepared, and as text."""
        self._window: tuple[int, Sequence[Message], list[Message], str] = 0, [], [], ""
        """What was rendered last: where it continues after the head, the messages from there, all as prepared, text."""
        self._prompt: tuple[_Context, str] = ([], {}), ""
        """The text with which the template opened a turn, and what it was rendered with."""
        self._tools: tuple[Sequence[Tool], Sequence[Tool]] = (), []

    def begin(self, conversation: Sequence[Message], tools: Sequence[Tool], options: TurnOptions) -> Continuation:
        context = self._context(tools, options)
        messages = [self._prepare(message) for message in conversation]
        return self._continue(self._open(messages, context, options), 0, messages, 0, context, options)

    def extend(
        self, conversation: Sequence[Message], start: int, tools: Sequence[Tool], options: TurnOptions, turn: Node
    ) -> Continuation | None:
        try:
            return self._extend(conversation, start, self._context(tools, options), options, turn)
        except RenderError:  # of the window; the conversation itself may still be rendered
            return None

    def _context(self, tools: Sequence[Tool], options: TurnOptions) -> _Context:
        sent, _ = self._tools
        if len(sent) != len(tools) or not all(map(is_, sent, tools)):
            self._tools = tools, self._specials.protect(list(tools))
        return self._tools[1], options.chat_template_kwargs

    def _extend(
        self, conversation: Sequence[Message], start: int, context: _Context, options: TurnOptions, turn: Node
    ) -> Continuation | None:
        stop = start - 1
        first = next((index + 1 for index in range(stop) if conversation[index].get("role") == "user"), stop)
        if self._head[:2] != (conversation[:first], context):
            head = [self._prepare(message) for message in conversation[:first]]
            texts = tuple(self._render(head, context, opens_turn=opens) for opens in (True, False))
            self._head = conversation[:first], context, head, texts
            self._window = 0, [], [], ""
        anchor, recent, before, opened = self._window
        if not recent or len(recent) > _MAX_WINDOW or conversation[anchor:stop] != recent:
            turns = (at for at in range(stop - 1, first - 1, -1) if conversation[at].get("role") == "assistant")
            anchor = next(turns, first)
            before = [*self._head[2], *(self._prepare(message) for message in conversation[anchor:stop])]
            opened = self._render(before, context, opens_turn=True)
        window = [*before, *(self._prepare(message) for message in conversation[stop:])]
        text = self._open(window, context, options)
        if not text.startswith(self._head[3]):
            return None
        if not options.instruction:
            self._window = anchor, conversation[anchor:], window, text
        is_opened = text.startswith(opened)
        at = len(opened) if is_opened else common_prefix(text, self._render(before, context, opens_turn=False))
        end_name, raw = self._names.get(turn.ids[-1], ""), self.raw_text(turn)
        if end_name and text.startswith(raw + end_name, at):
            end = self._specials.find(text, self._end_names, at + len(raw))
        else:
            end = self._find_end(window, len(before), context, options, text)
        if end is None:
            return None
        added = "" if end_name else self._specials.protect(self.text_added(conversation[stop], turn))
        if not text.endswith(added, at, end.start()):
            return None
        written = unprotected(text[at : end.start()])
        is_same = is_opened and written == raw
        if not is_same and written.endswith(raw):  # it may have started with given text
            is_same = self._tokenizer.decode(turn.ids[: len(turn.ids) - bool(end_name)]).endswith(written)
        note = "" if is_same else f"message {start} stays as sampled; the chat template would write it differently"
        cut = end.end() if end_name else end.start() - len(added)
        return self._continue(text, cut, window, len(before) + 1, context, options, (end_name, note))

    def _find_end(
        self, window: list[Message], index: int, context: _Context, options: TurnOptions, text: str
    ) -> re.Match[str] | None:
        """The end of the turn at `index`, which the template does not write as it was sampled.

        What does not change if the turn changes follows it.
        """
        other = dict(window[index])
        other["content"] = f"{other['content']}{_PROBE}"
        if calls := other.get("tool_calls"):
            function = calls[-1]["function"]
            arguments = function["arguments"]
            arguments = {**arguments, _PROBE: _PROBE} if isinstance(arguments, dict) else f"{arguments}{_PROBE}"
            other["tool_calls"] = [*calls[:-1], {**calls[-1], "function": {**function, "arguments": arguments}}]
        changed = self._open([*window[:index], other, *window[index + 1 :]], context, options)
        if changed == text:
            return None
        shared = common_prefix(text[::-1], changed[::-1])
        return self._specials.find(text, self._end_names, len(text) - shared)

    def _continue(
        self,
        text: str,
        start: int,
        messages: list[Message],
        first: int,
        context: _Context,
        options: TurnOptions,
        turn: tuple[str, str] | None = None,
    ) -> Continuation:
        """The ids of the text from `start` on: of the messages from `first` on, and of the opening.

        `turn` has the special token that ended the turn before them, and what the template writes differently in it.
        """
        cuts, end = list[int](), len(messages) - 1
        for index in range(first, end):
            is_cut = end - first < _MAX_CUTS or index == first
            cuts.append(self._cut(messages[: index + 1], context, text) if is_cut else 0)
        if first <= end:
            prompt = self._prompt[1] if self._prompt[0] == context and not options.instruction else ""
            if not prompt or not text.endswith(prompt):
                prompt = text[self._cut(messages, context, text) :]
                self._prompt = context, "" if options.instruction else prompt
            cuts.append(len(text) - len(prompt))
        last = max(cuts, default=0)
        reasoning = _OPEN_REASONING.search(text, max(last, start))
        prefill = options.prefill
        if reasoning and not prefill.startswith(THINK):
            text += self._specials.protect(f"\n{END_THINK}\n\n{prefill}") if prefill else ""
            options = options if prefill else replace(options, prefill=reasoning[0])
        elif reasoning:
            options = replace(options, prefill=reasoning[0])
        else:
            text += self._specials.protect(prefill)
        ids: list[list[int]] = [[] for _ in cuts]
        opening: list[int] = []
        after, note = turn or ("", "")
        owner = 0
        for end, segment in self._specials.encode(text[start:], after, is_start=not start):
            while owner < len(cuts) and start + end > cuts[owner]:
                owner += 1
            (ids[owner] if owner < len(cuts) else opening).extend(segment)
        return Continuation(ids, opening, options, ends_turn=turn is not None and not after, note=note)

    def _cut(self, messages: list[Message], context: _Context, text: str) -> int:
        """Where these messages end in the text, which has more of them; 0 if the template cannot tell."""
        try:
            part = self._render(messages, context, opens_turn=False)
        except RenderError:
            return 0
        return len(part) if text.startswith(part) else common_prefix(text, part)

    def _open(self, messages: list[Message], context: _Context, options: TurnOptions) -> str:
        """The text up to the policy's turn. An instruction is a message of its own, or the end of the last one."""
        if not options.instruction:
            return self._render(messages, context, opens_turn=True)
        instruction = self._specials.protect(options.instruction)
        try:
            text = self._render([*messages, {"role": "system", "content": instruction}], context, opens_turn=True)
            if text.count(instruction) and self._cut(messages, context, text):
                return text
        except RenderError:
            pass
        last = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{instruction}"}
        return self._render([*messages[:-1], last], context, opens_turn=True)

    def _render(self, messages: list[Message], context: _Context, *, opens_turn: bool) -> str:
        tools, arguments = context
        if self._has_parts:
            messages = [_with_parts(message) for message in messages]
        return self._source.render(messages, tools, opens_turn=opens_turn, arguments=arguments)

    def _prepare(self, message: Message) -> Message:
        """A message as a serving engine gives it to the template: arguments as objects, reasoning by all its names."""
        role, content = message.get("role"), message.get("content")
        if len(message) == 2 and type(role) is str and type(content) is str:  # as most are
            protected = self._specials.protect(content)
            return message if protected is content else {"role": role, "content": protected}
        result = dict(self._specials.protect(message))
        if type(result.get("content")) is not str:
            result["content"] = self._specials.protect(text_of(message))
        if calls := result.get("tool_calls"):
            result["tool_calls"] = [_prepare_call(call) for call in calls]
        if reasoning := result.pop("reasoning_content", None):
            result |= {"reasoning_content": reasoning, "thinking": reasoning}
        return result


def _prepare_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str) and is_json_object(arguments):
        arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}
