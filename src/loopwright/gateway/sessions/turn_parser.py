"""Parses a turn while it is sampled: ids to text, text to a message, and both to the deltas that a stream shows.

Deltas are never taken back: joined, they are the message. So the parser holds back what may still become something
else: half a character, half a stop string, white space before a tool call, and a call until it is complete. A call that
breaks off or is malformed is text, so that no client takes it for a call: some repair half an object. Control tokens
are not text, wherever they stand; the same characters in ordinary tokens are.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from loopwright.core.task import Message
from loopwright.engines.tokenizer import Tokenizer
from loopwright.gateway.sessions.tool_calls import HERMES, CallHead, Grammar, ObjectScanner, find_head, parse_call
from loopwright.gateway.sessions.turn import Delta
from loopwright.gateway.sessions.turn_options import PLAIN, TurnOptions

THINK, END_THINK = "<think>", "</think>"
_BETWEEN_CALLS = " \t\r\n;,]"
"""What may separate calls that have no marks."""
_FENCE = re.compile(r"```(?:json)?\s*(?=[\[{])")
"""What some models put before a call without a mark, though nothing asks them to."""
_PARTIAL_FENCE = re.compile(r"`{1,3}|```(?:j|js|jso|json)?\s*")


def visible_ids(ids: Sequence[int], control_ids: AbstractSet[int]) -> Sequence[int]:
    """The tokens that a user sees as text: all but control tokens."""
    if ids and ids[-1] in control_ids:
        ids = ids[:-1]
    return ids if control_ids.isdisjoint(ids) else [token for token in ids if token not in control_ids]


class TextDecoder:
    """Decodes ids a few at a time; half a character waits for its other half."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._ids: list[int] = []  # those whose text may still change, and the context before them
        self._context, self._shown = 0, 0

    def feed(self, ids: Iterable[int]) -> str:
        """Add ids; return the text that is certain by now."""
        self._ids += ids
        text = self._decode(self._ids)
        stable = text.rstrip("\N{REPLACEMENT CHARACTER}")
        new = stable[self._shown :]
        if len(stable) == len(text):
            # The latest ids stay as context: some tokenizers write a token's space only after another token.
            del self._ids[: self._context]
            self._context = len(self._ids)
            self._shown = len(self._decode(self._ids))
        else:
            self._shown = max(self._shown, len(stable))
        return new

    def finish(self) -> str:
        """The rest: half a character that stays incomplete."""
        return self._decode(self._ids)[self._shown :]


class TurnParser:
    """One turn's message as it is sampled. A stop string ends it: the text is cut there, the tokens are not.

    Raw text has no calls, no reasoning, and no white space to remove. The message starts with the prefill of `options`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        control_ids: AbstractSet[int],
        *,
        call_id: str,
        stop: Sequence[str] = (),
        raw: bool = False,
        grammar: Grammar = HERMES,
        options: TurnOptions = PLAIN,
    ) -> None:
        self._grammar, self._options, self._raw = grammar, options, raw
        self._tokenizer, self._control_ids, self._call_id = tokenizer, control_ids, call_id
        self._decoder: TextDecoder | None = None
        self._stop = tuple(text for text in stop if text)
        self._uncut = ""  # text in which a stop string may still start
        self._buffer = ""
        # A function and not a method of this parser, which would be a cycle for the garbage collector.
        self._state: Callable[[TurnParser], bool] = TurnParser._in_raw if raw else TurnParser._at_start
        self._space = ""
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._has_reasoned = False
        self._calls: list[dict[str, Any]] = []
        self.malformed: tuple[str, ...] = ()
        """The calls that cannot be parsed: they stay in the text."""
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._tops: list[Any] | None = None
        self._deltas: list[Delta] = []
        self._call_deltas: list[Delta] | None = None  # of a call that is not complete yet
        self.raw_text = ""
        """All text of a turn that was parsed at once."""
        self.stopped_by: str | None = None
        """The stop string that was found."""
        self.done = False
        """Whether nothing that may still be sampled belongs to the message."""
        self.may_stop = bool(self._stop) or options.single_tool_call
        """Whether the text may end the turn."""
        self.hidden = (0, 0)
        """Characters of reasoning and of text that the client wrote itself."""
        if options.prefill:
            self._run(options.prefill)
            if not options.prefill_visible:
                self._deltas = []
                self.hidden = len("".join(self._reasoning)), len("".join(self._content))

    def feed(self, ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[Any] | None = None) -> list[Delta]:
        """Add tokens; return the deltas that are certain by now."""
        if tops is not None or self._tops is not None:
            self._tops = [*(self._tops or [()] * len(self._tokens)), *(tops or [()] * len(ids))]
        self._tokens += ids
        self._logprobs += logprobs
        if (ids := visible_ids(ids, self._control_ids)) and not self.done:
            self._decoder = self._decoder or TextDecoder(self._tokenizer)
            self._run_until_stop(self._decoder.feed(ids))
        return self._take_deltas()

    def parse(self, ids: Sequence[int]) -> None:
        """Parse a complete turn at once: same message as `feed` and `finish`, but faster and without deltas."""
        self.raw_text = text = self._tokenizer.decode(visible_ids(ids, self._control_ids))
        start, options, grammar = text.lstrip(), self._options, self._grammar
        has_call = (grammar.bare and start[:1] in "{[`") or (grammar.open and grammar.open in text)
        has_marks = not self._raw and (start.startswith(THINK) or (options.parse_tool_calls and has_call))
        if not has_marks and not self._stop and not options.prefill:
            self._content = [text]  # as most turns are: nothing in it needs parsing
            return
        self._run_until_stop(text)
        self.finish()

    def finish(self) -> list[Delta]:
        """The remaining deltas, once nothing more is sampled. The last one has all tokens that are left."""
        if not self.done and self._decoder is not None:
            self._run_until_stop(self._decoder.finish())
        if not self.done:
            self._run(self._uncut)
        if self._state is TurnParser._in_call:  # the turn ended inside a call
            self._end_incomplete_call()
        elif self._state is TurnParser._in_reasoning:
            self._add_reasoning(self._buffer)
            self._space = ""
        elif self._state is not TurnParser._after_call or self._grammar.close:
            self._add_text(self._buffer)
        self._buffer, self._state = "", TurnParser._in_raw
        if not self._calls and not (self._has_reasoned and not self._content):
            self._add_content(self._space)
        if self._tokens:
            self._add_delta(Delta())
        return self._take_deltas()

    @property
    def message(self) -> Message:
        """The message so far."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if calls := self._calls[: len(self._calls) - (self._call_deltas is not None)]:
            message["tool_calls"] = calls
        return message

    # -- states -------------------------------------------------------------------------------------------------

    def _run_until_stop(self, text: str) -> None:
        """Parse what precedes a stop string, or cannot be the start of one."""
        if self._stop:
            self._uncut += text
            matches = [(self._uncut.find(stop), stop) for stop in self._stop if stop in self._uncut]
            if matches:
                at, self.stopped_by = min(matches)
                self.done = True
            else:
                at = len(self._uncut) - max(_overlap(self._uncut, stop) for stop in self._stop)
            text, self._uncut = self._uncut[:at], self._uncut[at:]
        self._run(text)

    def _run(self, text: str) -> None:
        self._buffer += text
        while self._buffer and self._state(self):
            pass

    # Each state consumes what it can from the buffer, and returns whether the next state may consume more.

    def _in_raw(self) -> bool:
        text, self._buffer = self._buffer, ""
        self._add_content(text)
        return False

    def _at_start(self) -> bool:
        """The start, which may be reasoning, or a call without a mark."""
        text = self._buffer.lstrip()
        if not self._has_reasoned and text.startswith(THINK):
            self._buffer, self._state, self._has_reasoned = text[len(THINK) :], TurnParser._in_reasoning, True
            return True
        if not text or (not self._has_reasoned and THINK.startswith(text)):
            return False
        if self._grammar.bare and self._options.parse_tool_calls and text[0] in "{[`":
            if text[0] == "`" and _PARTIAL_FENCE.fullmatch(text):
                return False
            fence = _FENCE.match(text)
            if fence or text[0] != "`":
                self._space = "" if self._has_reasoned else self._buffer[: -len(text)]
                self._fenced = fence is not None
                return self._start_call(text, marked=False, lead=fence[0] if fence else "")
        self._buffer, self._state = text if self._has_reasoned else self._buffer, TurnParser._in_text
        return True

    def _in_reasoning(self) -> bool:
        before, mark, after = self._buffer.partition(END_THINK)
        if mark:
            self._add_reasoning(before)
            self._buffer, self._space, self._state = after, "", TurnParser._at_start
            return True
        safe = len(self._buffer) - _overlap(self._buffer, END_THINK)
        text, self._buffer = self._buffer[:safe], self._buffer[safe:]
        self._add_reasoning(text)
        return False

    def _in_text(self) -> bool:
        mark = self._grammar.open if self._options.parse_tool_calls else ""
        before, is_marked, after = self._buffer.partition(mark) if mark else (self._buffer, "", "")
        if is_marked:
            self._add_text(before)
            return self._start_call(after, marked=True)
        safe = len(self._buffer) - (_overlap(self._buffer, mark) if mark else 0)
        text, self._buffer = self._buffer[:safe], self._buffer[safe:]
        self._add_text(text)
        return False

    def _after_call(self) -> bool:
        """After a call: its closing mark, or another call if the grammar has no marks."""
        close = self._grammar.close
        text = self._buffer.lstrip() if close else self._buffer.lstrip(_BETWEEN_CALLS)
        if self._fenced and text:
            if text != "```" and "```".startswith(text):
                return False
            if text.startswith("```"):
                self._fenced, self._buffer = False, text[3:]
                return True
        if not text or (text != close and close.startswith(text)):
            return False
        if close:
            self._buffer = text.removeprefix(close) if text.startswith(close) else self._buffer
        elif text[0] == "{":
            return self._start_call(text, marked=self._marked)
        else:
            self._buffer = text
        self._state = TurnParser._in_text
        return True

    # -- calls --------------------------------------------------------------------------------------------------

    _fenced = False

    def _start_call(self, text: str, *, marked: bool, lead: str = "") -> bool:
        """Start a call, unless it is one more than the request allows."""
        if self._calls and self._options.single_tool_call:
            self.done, self._buffer = True, ""
            return False
        start = len(lead) + (not marked and text[len(lead) : len(lead) + 1] == "[")
        self._lead, self._marked = text[:start], marked
        self._buffer, self._state = text[start:], TurnParser._in_call
        self._scanner, self._scanned, self._call_text = ObjectScanner(), 0, ""
        self._has_name, self._in_arguments, self._may_have_head = False, False, True
        return True

    def _in_call(self) -> bool:
        if not self._has_name:
            return self._find_name()
        text, self._buffer = self._buffer, ""
        certain = self._scanner.scan(text, depth=int(self._in_arguments))
        self._call_text += certain
        self._buffer = self._scanner.rest
        if self._in_arguments:
            self._add_arguments(certain)
            self._in_arguments = self._scanner.depth > 1
        if self._scanner.invalid:
            self._state = TurnParser._in_text
            self._drop_call()
            self._add_malformed(self._call_text)
        elif self._scanner.complete:
            self._state = TurnParser._after_call
            self._show_call()
        return True

    def _end_incomplete_call(self) -> None:
        """The turn ends inside a call, which may be complete except for its closing mark."""
        if not self._has_name:
            self._add_complete_call(self._buffer)
            return
        self._drop_call()
        self._add_malformed(self._call_text + self._scanner.pending + self._buffer)

    def _show_call(self) -> None:
        """Show a call that is complete."""
        deltas, self._call_deltas = self._call_deltas or [], None
        self._deltas += deltas

    def _drop_call(self) -> None:
        """Forget a call that is not one: its tokens belong to the text that it becomes."""
        deltas, self._call_deltas = self._call_deltas or [], None
        self._calls.pop()
        self._tokens = [*(token for delta in deltas for token in delta.ids), *self._tokens]
        self._logprobs = [*(value for delta in deltas for value in delta.logprobs), *self._logprobs]
        if any(delta.tops is not None for delta in deltas) or self._tops is not None:
            tops = [top for delta in deltas for top in (delta.tops or [()] * len(delta.ids))]
            self._tops = [*tops, *(self._tops or [()] * (len(self._tokens) - len(tops)))]

    def _find_name(self) -> bool:
        """A call whose name is not complete yet."""
        close = self._grammar.close
        before, closed, after = self._buffer.partition(close) if close else (self._buffer, "", "")
        head = self._may_have_head and find_head(before)
        if isinstance(head, CallHead):
            self._call_text, self._buffer = self._buffer[: head.at], self._buffer[head.at :]
            self._scanner, self._has_name, self._in_arguments = ObjectScanner(), True, True
            self._scanner.scan(self._call_text)
            self._add_call(head.name)
            return True
        self._may_have_head = head
        if close:
            if closed:
                self._buffer, self._state = after, TurnParser._in_text
                self._add_complete_call(before, close)
            return bool(closed)
        if not head:  # certainly not a call, wherever it may end
            self._state = TurnParser._in_text
            if self._marked:
                self._add_malformed("")
            self._buffer = self._lead + self._buffer
            return True
        # Without a closing mark, only the object itself shows where it ends.
        self._scanner.scan(self._buffer[self._scanned :])
        self._scanned = len(self._buffer)
        if not self._scanner.complete and not self._scanner.invalid:
            return False
        rest = self._scanner.rest
        text, self._buffer = self._buffer.removesuffix(rest) if rest else self._buffer, rest
        self._state = TurnParser._after_call if self._add_complete_call(text) else TurnParser._in_text
        return True

    def _add_complete_call(self, text: str, close: str = "") -> bool:
        """Add a call that was not streamed; False if the text is not a call, and stays text."""
        call = parse_call(text)
        if call is None:
            self._add_malformed(text, close)
            return False
        self._add_call(call[0])
        self._add_arguments(call[1])
        self._show_call()
        return True

    def _add_malformed(self, text: str, close: str = "") -> None:
        if self._marked:
            self.malformed += (text.strip() or self._grammar.open,)
        self._add_text((self._grammar.open if self._marked else self._lead) + text + close)

    def _add_call(self, name: str) -> None:
        index = len(self._calls)
        id = f"{self._call_id}_{index}"
        self._calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": ""}})
        self._call_deltas = []
        self._add_delta(Delta(index=index, id=id, name=name))

    def _add_arguments(self, text: str) -> None:
        if text:
            self._calls[-1]["function"]["arguments"] += text
            self._add_delta(Delta(index=len(self._calls) - 1, arguments=text))

    # -- deltas -------------------------------------------------------------------------------------------------

    def _add_reasoning(self, text: str) -> None:
        """Reasoning, without the white space around it."""
        text = self._space + text if self._reasoning else text.lstrip()
        visible = text.rstrip()
        self._space = text[len(visible) :]
        if visible:
            self._reasoning.append(visible)
            self._add_delta(Delta(reasoning=visible))

    def _add_text(self, text: str) -> None:
        """Text of the message. White space at its end waits: before a call it is not part of the text."""
        text = self._space + text
        visible = text.rstrip()
        self._space = text[len(visible) :]
        self._add_content(visible.lstrip() if self._calls and not self._content else visible)

    def _add_content(self, text: str) -> None:
        if text:
            self._content.append(text)
            self._add_delta(Delta(text))

    def _add_delta(self, delta: Delta) -> None:
        if self._tokens:
            # Not with `replace`, which is slow: this happens for every token.
            delta = Delta(
                delta.text,
                delta.index,
                delta.id,
                delta.name,
                delta.arguments,
                delta.reasoning,
                tuple(self._tokens),
                tuple(self._logprobs),
                None if self._tops is None else tuple(self._tops),
            )
            self._tokens, self._logprobs, self._tops = [], [], None
        (self._deltas if self._call_deltas is None else self._call_deltas).append(delta)

    def _take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of a text may be the start of a mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
