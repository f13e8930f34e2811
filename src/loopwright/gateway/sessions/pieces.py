"""Pieces of a turn, as a stream shows them, and ids as text, a few at a time."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from loopwright.engines.base import Tops
from loopwright.engines.tokenizer import Tokenizer

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Delta:
    """What streaming adds: text, reasoning, or more of the tool call `index`. `id` and `name` come once, first.

    A piece may be empty but for its tokens: those that stand for nothing visible, such as the end of a turn.
    """

    text: str = ""
    index: int | None = None
    """The tool call that this belongs to; None for text."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    thought: str = ""
    """Reasoning, which is none of the text."""
    ids: tuple[int, ...] = ()
    """The tokens that it stands for. All pieces of a turn together hold all of its tokens, in order."""
    logprobs: tuple[float, ...] = ()
    tops: Tops | None = None
    """What else was likely at each of its tokens, where the engine was asked."""


Heard = Callable[[Delta], None]
"""Whoever follows a turn as it is sampled."""


class TextDecoder:
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
