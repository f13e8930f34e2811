"""Sampled tokens as text, each with the probability that the policy gave it."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopwright.core.episode import Node
from loopwright.engines.base import EngineError
from loopwright.engines.inprocess import smollm2
from loopwright.engines.named_tokenizer import BYTE_TOKENIZER_FILE
from loopwright.engines.named_tokenizer import tokenizer_of as named_tokenizer
from loopwright.engines.tokenizer import ByteTokenizer, Tokenizer
from loopwright.reports.formatting import number

LEVELS = (0.9, 0.5, 0.1, 0.01)
"""The probabilities at which the shade of a token changes."""


@dataclass(frozen=True)
class TokenText:
    """The text of one sampled token, or of several that were not sampled, which have no logprob."""

    text: str
    logprob: float | None = None

    @property
    def level(self) -> int | None:
        """From 0 (certain) to 4 (unlikely), for shading; None if it was not sampled."""
        if self.logprob is None:
            return None
        probability = math.exp(self.logprob)
        return next((place for place, least in enumerate(LEVELS) if probability >= least), len(LEVELS))

    @property
    def title(self) -> str:
        """Logprob and probability in words."""
        if self.logprob is None:
            return ""
        return f"logprob {number(self.logprob, 4)}, p {number(math.exp(self.logprob), 3)}"

    @property
    def visible_text(self) -> str:
        """The text; a token that is only line breaks gets a mark to point at."""
        return self.text if self.text.strip("\n") else self.text.replace("\n", "⏎\n")


def tokenizer_of(engine: Mapping[str, Any], folder: Path | None = None) -> Tokenizer | None:
    """The tokenizer of a run's engine, or of the policy it trained; None if none is on this machine."""
    if engine.get("type") == "scripted":
        return ByteTokenizer()
    places = [str(name) for part in ("model", "tokenizer") if (name := engine.get(part))]
    places = [str(smollm2.cached_directory() or place) if place == "smollm2" else place for place in places]
    for place in [*([] if folder is None else [str(folder / "policy")]), *places]:
        # Nothing is downloaded for a report.
        if place in ("tiny", "bytes") or any(
            Path(place, file).is_file() for file in (BYTE_TOKENIZER_FILE, "tokenizer.json")
        ):
            with suppress(EngineError, OSError):
                return named_tokenizer(place, Path())
    return None


def token_texts(node: Node, tokenizer: Tokenizer | None) -> Iterator[TokenText]:
    """The tokens of a message, in order; a token without text is shown by its number."""
    try:
        texts = [f"⟨{token}⟩" for token in node.ids] if tokenizer is None else tokenizer.pieces(node.ids)
    except (KeyError, ValueError, OverflowError):
        texts = [f"⟨{token}⟩" for token in node.ids]
    unsampled: list[str] = []
    for text, logprob, sampled in zip(texts, node.logprobs, node.mask, strict=True):
        if not sampled:
            unsampled.append(text)
            continue
        if unsampled:
            yield TokenText("".join(unsampled))
            unsampled = []
        yield TokenText(text, logprob)
    if unsampled:
        yield TokenText("".join(unsampled))
