"""Tokenizers of the hub, as `tokenizer.json` has them, held to our promise: no text turns into a special token."""

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class HubTokenizer:
    """A tokenizer of bytes: of GPT-2's kind, as most are, or of SentencePiece's, as Llama 2's is."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        tokenizer.encode_special_tokens = True  # which means: as the text that they are
        tokenizer.no_padding()
        tokenizer.no_truncation()
        described = json.loads(tokenizer.to_str())
        added = described.get("added_tokens") or []
        self.specials: Mapping[str, int] = {each["content"]: each["id"] for each in added if each["special"]}
        self._special_ids = frozenset(self.specials.values())
        as_text = {each["id"] for each in added}
        to_bytes = _from_gpt2 if "ByteLevel" in json.dumps(described["decoder"]) else _from_sentencepiece
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._bytes = {
            number: text.encode() if number in as_text else to_bytes(text) for text, number in vocabulary.items()
        }
        self.size = max(self._bytes, default=-1) + 1

    @classmethod
    def of(cls, place: str) -> "HubTokenizer":
        """The tokenizer of a directory, or of a name on the hub."""
        from tokenizers import Tokenizer

        file = Path(place) / "tokenizer.json"
        return cls(Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(place))

    @classmethod
    def of_text(cls, text: str) -> "HubTokenizer":
        """The tokenizer that `as_text` wrote."""
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_str(text))

    def as_text(self) -> str:
        """All of it, as `tokenizer.json` has it."""
        return str(self._tokenizer.to_str())

    def encode(self, text: str) -> list[int]:
        """Half a surrogate pair, which is no text, becomes a question mark."""
        text = text.encode("utf-8", "replace").decode()
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are no UTF-8, and ids that are no tokens, become replacement characters."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", "replace")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """A character that several tokens share stands at the first of them."""
        found, begun = [""] * len(ids), 0
        decoder = getincrementaldecoder("utf-8")("replace")
        for index, token in enumerate(ids):
            if token in self._special_ids:
                found[begun] += decoder.decode(b"", final=True)
                begun = index
            found[begun] += decoder.decode(self.bytes_of(token))
            pending = len(decoder.getstate()[0])
            if pending <= len(self.bytes_of(token)):  # what is open now began in this token, if anything is
                begun = index if pending else index + 1
        if begun < len(ids):
            found[begun] += decoder.decode(b"", final=True)
        return found

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for; an id that is no token, for a replacement character."""
        return self._bytes.get(token, "\N{REPLACEMENT CHARACTER}".encode())


def _gpt2_alphabet() -> dict[str, int]:
    """The characters that stand for bytes: themselves where they can be seen, others from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_ALPHABET = _gpt2_alphabet()


def _from_gpt2(text: str) -> bytes:
    return bytes(_ALPHABET[character] for character in text) if all(c in _ALPHABET for c in text) else text.encode()


def _from_sentencepiece(text: str) -> bytes:
    match = _BYTE.fullmatch(text)
    return bytes((int(match[1], 16),)) if match else text.replace("▁", " ").encode()
