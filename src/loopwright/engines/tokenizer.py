"""Tokenizers: text to ids and back. The byte tokenizer is exact for any text and needs no files."""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to ids and back; special tokens have names, and no text ever turns into one."""

    specials: Mapping[str, int]
    size: int
    """One more than its largest id."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens by their names."""
        ...

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each token stands for, for people to read."""
        ...

    def bytes_of(self, token: int) -> bytes:
        """What one token stands for, which need not be whole characters."""
        ...


class ByteTokenizer:
    """A token per byte, and two that begin and end a message."""

    specials: Mapping[str, int] = {"<|im_start|>": 256, "<|im_end|>": 257}
    size = 258

    def __init__(self) -> None:
        self._names = {number: name for name, number in self.specials.items()}

    def encode(self, text: str) -> list[int]:
        """UTF-8, byte for byte; half a surrogate pair, which is no text, becomes a question mark."""
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are no UTF-8, and ids that are no tokens, become replacement characters."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", "replace")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """A character per token where that is possible; the later bytes of a long character are empty."""
        found, begun = [""] * len(ids), 0
        decoder = getincrementaldecoder("utf-8")("replace")
        for index, token in enumerate(ids):
            if 0 <= token < 256:
                found[begun] += decoder.decode(bytes((token,)))
                begun = index + 1 - len(decoder.getstate()[0])
            else:
                found[begun] += decoder.decode(b"", final=True)
                found[index] += self._name(token)
                begun = index + 1
        if begun < len(ids):
            found[begun] += decoder.decode(b"", final=True)
        return found

    def bytes_of(self, token: int) -> bytes:
        """A byte, or a special token's name."""
        return bytes((token,)) if 0 <= token < 256 else self._name(token).encode()

    def _name(self, token: int) -> str:
        return self._names.get(token, "\N{REPLACEMENT CHARACTER}")
