"""Reads what is sampled, as it comes: ids to text, text to a message, and both to the pieces that a stream shows.

Pieces are never taken back: joined, they are the message. So the reader holds back what may yet turn out to be
something else: half a character, half a stop string, white space before a tool call, a call that has not ended.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from loopwright.core.task import Message
from loopwright.engines.tokenizer import Tokenizer

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Piece:
    """What streaming adds: a text delta, or a delta of the tool call `index`. `id` and `name` come once, first.

    A piece may be empty but for its tokens: those that stand for nothing visible, such as the end of a turn.
    """

    text: str = ""
    index: int | None = None
    """The tool call that this belongs to; None for text."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    ids: tuple[int, ...] = ()
    """The tokens that it stands for. All pieces of a turn together hold all of its tokens, in order."""
    logprobs: tuple[float, ...] = ()


class TextReader:
    """Ids to text, a few at a time; half a character waits for its other half."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._ids: list[int] = []  # only those that the next ones may change the text of, and the ones before them
        self._read, self._shown = 0, 0

    def feed(self, ids: Iterable[int]) -> str:
        """The text that can be told by now."""
        self._ids += ids
        text = self._decode(self._ids)
        stable = text.rstrip(_UNKNOWN)
        new = stable[self._shown :]
        if len(stable) == len(text):
            # What came last stays as context: some tokenizers write a token's space only after another one.
            del self._ids[: self._read]
            self._read = len(self._ids)
            self._shown = len(self._decode(self._ids))
        else:
            self._shown = max(self._shown, len(stable))
        return new

    def finish(self) -> str:
        """What is left: half a character that stays one."""
        return self._decode(self._ids)[self._shown :]


class Reader:
    """One turn's message as it is sampled. `stop` ends it: the text is cut there, the tokens are not.

    Raw text has no calls and no white space to leave out.
    """

    def __init__(
        self, tokenizer: Tokenizer, end_id: int, *, call_id: str, stop: Sequence[str] = (), raw: bool = False
    ) -> None:
        self._raw = raw
        self._decode, self._text = tokenizer.decode, TextReader(tokenizer)
        self._end, self._call_id = end_id, call_id
        self._stop = tuple(text for text in stop if text)
        self._held: list[int] = []  # an end that is shown only if something follows it
        self._uncut = ""  # text in which a stop string may yet begin
        self._buffer, self._in_call = "", False
        self._space = ""
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._malformed: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._pieces: list[Piece] = []
        self.stopped_by: str | None = None
        """The stop string that was met."""

    def feed(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[Piece]:
        """Take in tokens; the pieces that can be told by now."""
        self._tokens += ids
        self._logprobs += logprobs
        ids = [*self._held, *ids]
        self._held = [ids.pop()] if ids and ids[-1] == self._end else []
        if ids and self.stopped_by is None:
            self._cut(self._text.feed(ids))
        return self._taken()

    def whole(self, ids: Sequence[int]) -> list[Piece]:
        """Take in a whole turn at once, as if fed and finished; cheaper, and its pieces have no tokens."""
        self._cut(self._decode(ids[:-1] if ids and ids[-1] == self._end else ids))
        return self.finish()

    def finish(self) -> list[Piece]:
        """The rest: nothing more can change it. The last piece holds every token that is left."""
        if self.stopped_by is None:
            self._cut(self._text.finish())
        if self.stopped_by is None:
            self._read(self._uncut)
        if self._in_call:
            self._called(self._buffer, closed=False)
        else:
            self._say(self._buffer)
        self._buffer, self._in_call = "", False
        if not self._calls:
            self._tell(self._space)
        if self._tokens:
            self._show(Piece())
        return self._taken()

    @property
    def stops(self) -> bool:
        """Whether a text may end the turn."""
        return bool(self._stop)

    @property
    def message(self) -> Message:
        """The message so far."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._calls:
            message["tool_calls"] = list(self._calls)
        return message

    @property
    def malformed(self) -> tuple[str, ...]:
        """The calls in it that nobody can read; they stay in its text."""
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
        else:
            at = len(self._uncut) - max(_overlap(self._uncut, stop) for stop in self._stop)
        text, self._uncut = self._uncut[:at], self._uncut[at:]
        return self._read(text)

    def _read(self, text: str) -> None:
        if self._raw:
            return self._tell(text)
        self._buffer += text
        while True:
            mark = _CLOSE if self._in_call else _OPEN
            before, found, after = self._buffer.partition(mark)
            if not found:
                break
            self._buffer = after
            if self._in_call:
                self._called(before, closed=True)
            else:
                self._say(before)
            self._in_call = not self._in_call
        if not self._in_call:
            safe = len(self._buffer) - _overlap(self._buffer, _OPEN)
            text, self._buffer = self._buffer[:safe], self._buffer[safe:]
            self._say(text)
        return None

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
            self._show(Piece(text))

    def _called(self, text: str, *, closed: bool) -> None:
        index = len(self._calls)
        call = _call(text, f"{self._call_id}_{index}")
        if call is None:
            self._malformed.append(text.strip())
            self._say(_OPEN + text + (_CLOSE if closed else ""))
            return
        self._calls.append(call)
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        self._show(Piece(index=index, id=call["id"], name=name))
        self._show(Piece(index=index, arguments=arguments))

    def _show(self, piece: Piece) -> None:
        if self._tokens:
            piece = Piece(
                piece.text,
                piece.index,
                piece.id,
                piece.name,
                piece.arguments,
                ids=tuple(self._tokens),
                logprobs=tuple(self._logprobs),
            )
            self._tokens, self._logprobs = [], []
        self._pieces.append(piece)

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces


Heard = Callable[[Piece], None]
"""Whoever follows a turn as it is sampled."""


def _overlap(text: str, mark: str) -> int:
    """How much of the end of a text may be the beginning of a mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def _call(text: str, call_id: str) -> dict[str, Any] | None:
    """The call that this text stands for, if it is one. Not by orjson, which rounds integers of more than 64 bits."""
    try:
        read = json.loads(text)
        arguments = read.get("arguments", {}) if isinstance(read, dict) else None
        if not isinstance(arguments, dict) or not isinstance(read.get("name"), str):
            return None
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (read["name"] + written).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError):
        return None
    return {"id": call_id, "type": "function", "function": {"name": read["name"], "arguments": written}}
