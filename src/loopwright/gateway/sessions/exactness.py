"""Verdicts: how each turn's prompt relates to what was sampled before it."""

from dataclasses import dataclass
from enum import StrEnum


class Exactness(StrEnum):
    """From best to worst."""

    EXACT = "exact"
    """All that was said before is in the prompt as it was sampled."""
    BRIDGED = "bridged"
    """So it is, but tokens that nobody sampled were added where a turn had been cut off."""
    FORKED = "forked"
    """The conversation goes on otherwise than before: a branch of its own, exact in itself."""
    BROKEN = "broken"
    """What was sampled is not known in full; nothing of the episode may be trained on."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A turn's verdict; `token` is the first place of the prompt, or of prompt and turn, where it parts."""

    kind: Exactness = Exactness.EXACT
    reason: str = ""
    token: int | None = None
