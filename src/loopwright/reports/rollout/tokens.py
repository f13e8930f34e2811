"""Sampled tokens for people to read: the text of each, and how likely the policy held it to be."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopwright.core.episode import Node
from loopwright.engines.base import EngineError
from loopwright.engines.inprocess import smollm2
from loopwright.engines.named_tokenizer import BYTES
from loopwright.engines.named_tokenizer import tokenizer_of as named_tokenizer
from loopwright.engines.tokenizer import ByteTokenizer, Tokenizer

LEVELS = (0.9, 0.5, 0.1, 0.01)
"""Tokens at least this probable have a shade of their own; the rest, the unlikeliest, a fifth."""


@dataclass(frozen=True)
class Piece:
    """One token, or several that nobody sampled. `level` is None for those, otherwise 0 (sure) to 4 (unlikely)."""

    text: str
    logprob: float | None = None

    @property
    def level(self) -> int | None:
        """How unlikely it was, for colouring."""
        if self.logprob is None:
            return None
        probability = math.exp(self.logprob)
        return next((place for place, least in enumerate(LEVELS) if probability >= least), len(LEVELS))


def tokenizer_of(engine: Mapping[str, Any], folder: Path | None = None) -> Tokenizer | None:
    """The tokenizer of a run's engine, where its tokens can be read without it; what a run has trained has one, too."""
    if engine.get("type") == "scripted":
        return ByteTokenizer()
    places = [str(name) for part in ("model", "tokenizer") if (name := engine.get(part))]
    places = [str(smollm2.made() or place) if place == "smollm2" else place for place in places]
    for place in [*([] if folder is None else [str(folder / "policy")]), *places]:
        # Nothing is fetched or made for a report: a name on the hub is not asked for.
        if place in ("tiny", "bytes") or any(Path(place, file).is_file() for file in (BYTES, "tokenizer.json")):
            with suppress(EngineError, OSError):
                return named_tokenizer(place, Path())
    return None


def pieces(node: Node, tokenizer: Tokenizer | None) -> Iterator[Piece]:
    """A message's own tokens, in order; a token without a text of its own is told by its number."""
    try:
        texts = [f"⟨{token}⟩" for token in node.ids] if tokenizer is None else tokenizer.pieces(node.ids)
    except (KeyError, ValueError, OverflowError):
        texts = [f"⟨{token}⟩" for token in node.ids]
    given: list[str] = []
    for text, logprob, sampled in zip(texts, node.logprobs, node.mask, strict=True):
        if not sampled:
            given.append(text)
            continue
        if given:
            yield Piece("".join(given))
            given = []
        yield Piece(text, logprob)
    if given:
        yield Piece("".join(given))
