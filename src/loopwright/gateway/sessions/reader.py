"""Reads what is sampled, as it comes: ids to text, text to a message, and both to the pieces that a stream shows.

Pieces are never taken back: joined, they are the message. So the reader holds back what may yet turn out to be
something else: half a character, half a stop string, white space before a tool call, the beginning of a call. Once its
name is known it is a call, whose arguments are told as they come; if they break off, what was told of them stays.
"""

import re
from collections.abc import Container, Sequence
from typing import Any

from loopwright.core.task import Message
from loopwright.engines.tokenizer import Tokenizer
from loopwright.gateway.sessions.calls import HERMES, Grammar, Head, Object, head, whole
from loopwright.gateway.sessions.manner import PLAIN, Manner
from loopwright.gateway.sessions.pieces import Delta, TextDecoder

THINK, THOUGHT = "<think>", "</think>"
_BETWEEN = " \t\r\n;,]"
"""What may stand between calls that have no marks."""
_FENCE = re.compile(r"```(?:json)?\s*(?=[\[{])")
"""What some put before a call that has no mark, though nobody asked them to."""
_FENCE_BEGUN = re.compile(r"`{1,3}|```(?:j|js|jso|json)?\s*")


class TurnParser:
    """One turn's message as it is sampled. `stop` ends it: the text is cut there, the tokens are not.

    Raw text has no calls, no reasoning and no white space to leave out. `manner` may begin the message with text that
    was given.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        ends: Container[int],
        *,
        call_id: str,
        stop: Sequence[str] = (),
        raw: bool = False,
        grammar: Grammar = HERMES,
        manner: Manner = PLAIN,
    ) -> None:
        self._grammar, self._manner = grammar, manner
        self._decode, self._text = tokenizer.decode, TextDecoder(tokenizer)
        self._ends, self._call_id = ends, call_id
        self._stop = tuple(text for text in stop if text)
        self._held: list[int] = []  # an end that is shown only if something follows it
        self._uncut = ""  # text in which a stop string may yet begin
        self._buffer, self._state = "", self._told if raw else self._begun
        self._space = ""
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._thought = False
        self._calls: list[dict[str, Any]] = []
        self._malformed: list[str] = []
        self._marked, self._fenced, self._lead = False, False, ""  # how the call that is being read began
        self._object, self._scanned, self._named, self._arguing = Object(), 0, False, False
        self._written, self._hopeful = "", True
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._tops: list[Any] | None = None
        self._pieces: list[Delta] = []
        self.stopped_by: str | None = None
        """The stop string that was met."""
        self.ended = False
        """Whether nothing that may yet be sampled belongs to the message."""
        if manner.given:
            self._read(manner.given)
        self.unshown = (0, 0)
        """Characters of reasoning and of text that the client has already, since it gave them."""
        if not manner.shown:
            self._pieces = []
            self.unshown = len("".join(self._thoughts)), len("".join(self._content))

    def feed(self, ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[Any] | None = None) -> list[Delta]:
        """Take in tokens; the pieces that can be told by now."""
        if tops is not None or self._tops is not None:
            self._tops = [*(self._tops or [()] * len(self._tokens)), *(tops or [()] * len(ids))]
        self._tokens += ids
        self._logprobs += logprobs
        ids = [*self._held, *ids]
        self._held = [ids.pop()] if ids and ids[-1] in self._ends else []
        if ids and not self.ended:
            self._cut(self._text.feed(ids))
        return self._taken()

    def whole(self, ids: Sequence[int]) -> list[Delta]:
        """Take in a whole turn at once, as if fed and finished; cheaper, and its pieces have no tokens."""
        self._cut(self._decode(ids[:-1] if ids and ids[-1] in self._ends else ids))
        return self.finish()

    def finish(self) -> list[Delta]:
        """The rest: nothing more can change it. The last piece holds every token that is left."""
        if not self.ended:
            self._cut(self._text.finish())
        if not self.ended:
            self._read(self._uncut)
        if self._state == self._calling:
            self._break_off()
        elif self._state == self._thinking:
            self._think(self._buffer)
            self._space = ""
        elif self._state != self._closing or self._grammar.close:
            self._say(self._buffer)
        self._buffer, self._state = "", self._told
        if not self._calls and not (self._thought and not self._content):
            self._tell(self._space)
        if self._tokens:
            self._show(Delta())
        return self._taken()

    @property
    def stops(self) -> bool:
        """Whether what is said may end the turn."""
        return bool(self._stop) or self._manner.single

    @property
    def message(self) -> Message:
        """The message so far."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = list(self._calls)
        return message

    @property
    def malformed(self) -> tuple[str, ...]:
        """The calls in it that nobody can read: they stay in its text, or break off where they cannot be read."""
        return tuple(self._malformed)

    # -- text to pieces -----------------------------------------------------------------------------------------

    def _cut(self, text: str) -> None:
        """Hand on what lies before a stop string, or cannot be the beginning of one."""
        if not self._stop:
            return self._read(text)
        self._uncut += text
        found = [(self._uncut.find(stop), stop) for stop in self._stop if stop in self._uncut]
        if found:
            at, self.stopped_by = min(found)
            self.ended = True
        else:
            at = len(self._uncut) - max(_overlap(self._uncut, stop) for stop in self._stop)
        text, self._uncut = self._uncut[:at], self._uncut[at:]
        return self._read(text)

    def _read(self, text: str) -> None:
        self._buffer += text
        while self._buffer and self._state():
            pass

    # Each state takes what it can from the buffer, and tells whether there may be more for the next one.

    def _told(self) -> bool:
        """Raw text."""
        text, self._buffer = self._buffer, ""
        self._tell(text)
        return False

    def _begun(self) -> bool:
        """The beginning, which may be reasoning, or a call without a mark."""
        text = self._buffer.lstrip()
        if not self._thought and text.startswith(THINK):
            self._buffer, self._state, self._thought = text[len(THINK) :], self._thinking, True
            return True
        if not text or (not self._thought and THINK.startswith(text)):
            return False
        if self._grammar.bare and self._manner.calls and text[0] in "{[`":
            if text[0] == "`" and _FENCE_BEGUN.fullmatch(text):
                return False
            fence = _FENCE.match(text)
            if fence or text[0] != "`":
                self._space, self._fenced = "" if self._thought else self._buffer[: -len(text)], fence is not None
                return self._call(text, marked=False, lead=fence[0] if fence else "")
        self._buffer, self._state = text if self._thought else self._buffer, self._talking
        return True

    def _thinking(self) -> bool:
        before, found, after = self._buffer.partition(THOUGHT)
        if found:
            self._think(before)
            self._buffer, self._space, self._state = after, "", self._begun
            return True
        safe = len(self._buffer) - _overlap(self._buffer, THOUGHT)
        text, self._buffer = self._buffer[:safe], self._buffer[safe:]
        self._think(text)
        return False

    def _talking(self) -> bool:
        mark = self._grammar.open if self._manner.calls else ""
        before, found, after = self._buffer.partition(mark) if mark else (self._buffer, "", "")
        if found:
            self._say(before)
            return self._call(after, marked=True)
        safe = len(self._buffer) - (_overlap(self._buffer, mark) if mark else 0)
        text, self._buffer = self._buffer[:safe], self._buffer[safe:]
        self._say(text)
        return False

    def _closing(self) -> bool:
        """After a call: its closing mark, or another call that has none."""
        close = self._grammar.close
        text = self._buffer.lstrip() if close else self._buffer.lstrip(_BETWEEN)
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
            return self._call(text, marked=self._marked)
        else:
            self._buffer = text
        self._state = self._talking
        return True

    # -- calls --------------------------------------------------------------------------------------------------

    def _call(self, text: str, *, marked: bool, lead: str = "") -> bool:
        """A call begins here, unless it is one more than was asked for."""
        if self._calls and self._manner.single:
            self.ended, self._buffer = True, ""
            return False
        start = len(lead) + (not marked and text[len(lead) : len(lead) + 1] == "[")
        self._lead = text[:start]
        self._buffer, self._marked, self._state = text[start:], marked, self._calling
        self._object, self._scanned, self._named, self._written = Object(), 0, False, ""
        self._hopeful = True
        return True

    def _calling(self) -> bool:
        if not self._named:
            return self._opening()
        text, self._buffer = self._buffer, ""
        call = self._object
        said = call.take(text, depth=int(self._arguing))
        self._written += said
        self._buffer = call.rest
        if self._arguing:
            self._argue(said)
            self._arguing = call.depth > 1
        if call.broken:
            self._malformed.append(self._written.strip())
            self._state = self._talking
        elif call.ended:
            self._state = self._closing
        return True

    def _opening(self) -> bool:
        """A call of which the name is not known yet."""
        close = self._grammar.close
        before, closed, after = self._buffer.partition(close) if close else (self._buffer, "", "")
        found = self._hopeful and head(before)
        if isinstance(found, Head):
            self._written, self._buffer = self._buffer[: found.at], self._buffer[found.at :]
            self._object, self._named, self._arguing = Object(), True, True
            self._object.take(self._written)
            self._name(found.name)
            return True
        self._hopeful = found
        if close:
            if closed:
                self._buffer, self._state = after, self._talking
                self._called(before, close)
            return bool(closed)
        if not found:  # which is known before anybody knows how far it goes
            self._state = self._talking
            if self._marked:
                self._uncalled("")
            self._buffer = self._lead + self._buffer
            return True
        # Where no mark closes it, nobody knows where it ends but itself.
        self._object.take(self._buffer[self._scanned :])
        self._scanned = len(self._buffer)
        if not self._object.ended and not self._object.broken:
            return False
        rest = self._object.rest
        text, self._buffer = self._buffer.removesuffix(rest) if rest else self._buffer, rest
        self._state = self._closing if self._called(text) else self._talking
        return True

    def _called(self, text: str, close: str = "") -> bool:
        """A call that was not told as it came; or text, if it is none."""
        read = whole(text)
        if read is None:
            self._uncalled(text, close)
            return False
        self._name(read[0])
        self._argue(read[1])
        return True

    def _uncalled(self, text: str, close: str = "") -> None:
        if self._marked:
            self._malformed.append(text.strip() or self._grammar.open)
        self._say((self._grammar.open if self._marked else self._lead) + text + close)

    def _break_off(self) -> None:
        """The turn ended within a call."""
        if not self._named:
            self._called(self._buffer)
        elif self._arguing:
            self._malformed.append(self._written.strip())

    def _name(self, name: str) -> None:
        index = len(self._calls)
        id = f"{self._call_id}_{index}"
        self._calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": ""}})
        self._show(Delta(index=index, id=id, name=name))

    def _argue(self, text: str) -> None:
        if text:
            self._calls[-1]["function"]["arguments"] += text
            self._show(Delta(index=len(self._calls) - 1, arguments=text))

    # -- pieces -------------------------------------------------------------------------------------------------

    def _think(self, text: str) -> None:
        """Reasoning; white space around it is none of it."""
        text = self._space + text if self._thoughts else text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._thoughts.append(shown)
            self._show(Delta(thought=shown))

    def _say(self, text: str) -> None:
        """Text of the message; white space at its end waits, since before a call it is none of the text."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if self._calls and not self._content:
            shown = shown.lstrip()
        self._tell(shown)

    def _tell(self, text: str) -> None:
        if text:
            self._content.append(text)
            self._show(Delta(text))

    def _show(self, piece: Delta) -> None:
        if self._tokens:
            # Not by `replace`, which takes as long as all the rest: this is done for every token.
            piece = Delta(
                piece.text,
                piece.index,
                piece.id,
                piece.name,
                piece.arguments,
                piece.thought,
                tuple(self._tokens),
                tuple(self._logprobs),
                None if self._tops is None else tuple(self._tops),
            )
            self._tokens, self._logprobs, self._tops = [], [], None
        self._pieces.append(piece)

    def _taken(self) -> list[Delta]:
        pieces, self._pieces = self._pieces, []
        return pieces


def _overlap(text: str, mark: str) -> int:
    """How much of the end of a text may be the beginning of a mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
