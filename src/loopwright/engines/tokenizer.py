"""Tokenizers: text to ids and back, byte-level or from the hub. No text ever turns into a special token."""

import json
import re
from abc import ABC, abstractmethod
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from loopwright.engines.chat_template import ChatTemplateSource

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SENTENCEPIECE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SAMPLE_IDS = (*range(1024), *range(1024, 2**18, 17))
"""Ids that a fingerprint decodes, beyond the size of any vocabulary; unused ids decode alike everywhere."""
_SAMPLE_TEXT = (
    "The quick brown fox's 1234567890 jumps…\n\n\tdef f(x):\r\n    return {'a': [x**2, \"b\"]}  # 3.14e-10\n"
    "Grüße, ça va? Привет, мир! 你好世界 こんにちは 안녕하세요 مرحبا שלום 🙂👩‍💻 <|im_start|> https://example.org/a?b=c&d"
)


_VISIBLE_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


class Tokenizer(Protocol):
    """Text to ids and back; special tokens have names, and no text ever turns into one."""

    specials: Mapping[str, int]
    size: int
    """One more than its largest id."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text. Half a surrogate pair, which is not text, becomes a question mark."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens by their names. Invalid UTF-8 and unknown ids are replaced."""
        ...

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """A readable text per token. A character that several tokens share is shown at the first of them."""
        ...

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token, which may be part of a character."""
        ...


class _TokensAsBytes(ABC):
    """A tokenizer whose tokens are bytes each, so that text is the bytes of all, decoded."""

    _special_ids: frozenset[int]

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", "replace")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        texts, start = [""] * len(ids), 0
        decoder = getincrementaldecoder("utf-8")("replace")
        for index, token in enumerate(ids):
            if token in self._special_ids:  # shares no character with the token before it
                texts[start] += decoder.decode(b"", final=True)
                start = index
            texts[start] += decoder.decode(self.bytes_of(token))
            pending = len(decoder.getstate()[0])
            if pending <= len(self.bytes_of(token)):  # an incomplete character, if any, started in this token
                start = index if pending else index + 1
        if start < len(ids):
            texts[start] += decoder.decode(b"", final=True)
        return texts

    @abstractmethod
    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token."""


class ByteTokenizer(_TokensAsBytes):
    """One token per byte, and two that begin and end a message. Exact for any text, and needs no files."""

    specials: Mapping[str, int] = {"<|im_start|>": 256, "<|im_end|>": 257}
    _special_ids = frozenset(specials.values())
    size = 258
    max_token_bytes = 1

    def __init__(self) -> None:
        self._names = {number: name for name, number in self.specials.items()}

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def bytes_of(self, token: int) -> bytes:
        return bytes((token,)) if 0 <= token < 256 else self._names.get(token, _REPLACEMENT).encode()

    def hub_json(self) -> str:
        """The content of a `tokenizer.json` with the same ids, for programs that know only such files."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        tokenizer = Tokenizer(models.BPE(_ALPHABET | dict(self.specials), []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(name, special=True) for name in self.specials])
        return str(tokenizer.to_str(pretty=True))


class HubTokenizer(_TokensAsBytes):
    """A tokenizer from the hub, as `tokenizer.json` describes it: byte-level like GPT-2's, or SentencePiece."""

    def __init__(self, tokenizer: Any, chat_template: "ChatTemplateSource | None" = None) -> None:
        self._tokenizer, self.chat_template = tokenizer, chat_template
        self._lookup: Callable[[str], Sequence[int] | None] | None = None
        tokenizer.encode_special_tokens = True  # in the library's words: encode their names as ordinary text
        tokenizer.no_padding()
        tokenizer.no_truncation()
        description = json.loads(tokenizer.to_str())
        added_tokens = description.get("added_tokens") or []
        self.specials: Mapping[str, int] = {each["content"]: each["id"] for each in added_tokens if each["special"]}
        self._special_ids = frozenset(self.specials.values())
        self.strips = {each["content"]: (each["lstrip"], each["rstrip"]) for each in added_tokens if each["special"]}
        """Whether a special token takes the white space before and after it."""
        self._is_prefixed = '"prepend_scheme": "first"' in json.dumps(description["pre_tokenizer"])
        added_ids = {each["id"] for each in added_tokens}
        to_bytes = _gpt2_bytes if "ByteLevel" in json.dumps(description["decoder"]) else _sentencepiece_bytes
        self._bytes = {
            number: text.encode() if number in added_ids else to_bytes(text)
            for text, number in tokenizer.get_vocab(with_added_tokens=True).items()
        }
        self.size = max(self._bytes, default=-1) + 1
        self.max_token_bytes = _max_token_bytes(description, self._bytes)
        """The most bytes of a text that one token stands for; None if unbounded."""

    @classmethod
    def load(cls, location: str, chat_template: "ChatTemplateSource | None" = None) -> "HubTokenizer":
        """The tokenizer of a directory, or of a name on the hub."""
        from tokenizers import Tokenizer

        file = Path(location) / "tokenizer.json"
        tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(location)
        return cls(tokenizer, chat_template)

    @classmethod
    def from_text(cls, text: str, chat_template: "ChatTemplateSource | None" = None) -> "HubTokenizer":
        """The inverse of `as_text`."""
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_str(text), chat_template)

    def as_text(self) -> str:
        """The content of its `tokenizer.json`."""
        return str(self._tokenizer.to_str())

    @contextmanager
    def looking_up(self, lookup: Callable[[str], Sequence[int] | None]) -> Iterator[None]:
        """Let `encode` ask a function first, which may have the ids of a text, or None."""
        former, self._lookup = self._lookup, lookup
        try:
            yield
        finally:
            self._lookup = former

    def encode(self, text: str) -> list[int]:
        if self._lookup is not None and (ready := self._lookup(text)) is not None:
            return list(ready)
        text = text.encode("utf-8", "replace").decode()
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_later(self, text: str) -> list[int]:
        """The ids of text that follows a special token: some tokenizers put a space before the very first word only."""
        if not self._is_prefixed:
            return self.encode(text)
        line, ids = self.encode("\n"), self.encode(f"\n{text}")
        return ids[len(line) :] if ids[: len(line)] == line else self.encode(text)

    def bytes_of(self, token: int) -> bytes:
        return self._bytes.get(token, _REPLACEMENT.encode())


def _max_token_bytes(description: Mapping[str, Any], tokens: Mapping[int, bytes]) -> int | None:
    """The most bytes of a text that one token stands for; None if text may vanish, or become an unknown token."""
    normalizer, model = description.get("normalizer") or {"type": "Sequence", "normalizers": []}, description["model"]
    factor = 1
    for step in normalizer.get("normalizers", [normalizer]):
        if step["type"] == "NFC":
            factor = 3  # composed Hangul takes a third of the bytes
        elif step["type"] != "Prepend" and step != _VISIBLE_SPACES:
            return None
    if not (model.get("byte_fallback") or "ByteLevel" in json.dumps(description.get("pre_tokenizer"))):
        return None
    return factor * max(map(len, tokens.values()), default=1)


_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_HIDDEN = [byte for byte in range(256) if byte not in _PRINTABLE]
_ALPHABET = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + index): byte for index, byte in enumerate(_HIDDEN)}
"""GPT-2's characters that stand for bytes: themselves where they are printable, others from 256 on."""


def _gpt2_bytes(text: str) -> bytes:
    return bytes(_ALPHABET[character] for character in text) if all(c in _ALPHABET for c in text) else text.encode()


def _sentencepiece_bytes(text: str) -> bytes:
    match = _SENTENCEPIECE_BYTE.fullmatch(text)
    return bytes((int(match[1], 16),)) if match else text.replace("▁", " ").encode()


def fingerprint(tokenizer: Tokenizer) -> str:
    """Equal for tokenizers, perhaps on two machines, with the same tokens and special tokens that split text alike."""
    decoded = [tokenizer.decode((token,)) for token in _SAMPLE_IDS]
    facts = sorted(tokenizer.specials.items()), tokenizer.encode(_SAMPLE_TEXT), decoded
    return blake2b(repr(facts).encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def ends_with_stop(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str]) -> bool:
    """Whether the last of these tokens completes one of the stop texts."""
    if not stop:
        return False
    # A text spans at most as many tokens as it has bytes.
    tail = tokenizer.decode(ids[-max(len(text.encode("utf-8", "replace")) for text in stop) :])
    return any(text in tail for text in stop)
