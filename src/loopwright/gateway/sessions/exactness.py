"""Exactness: how each turn's prompt relates to what was sampled before it."""

from dataclasses import dataclass
from enum import StrEnum


class Exactness(StrEnum):
    """From best to worst."""

    EXACT = "exact"
    """The prompt contains everything that was sampled before, token by token."""
    BRIDGED = "bridged"
    """As exact, but with tokens that were not sampled, such as the missing end of a turn that was cut off."""
    FORKED = "forked"
    """The conversation differs from what was recorded: a separate branch, exact in itself."""
    BROKEN = "broken"
    """Some of what was sampled is unknown; the episode must not be trained on."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The exactness of one turn; `token` is the first position, in prompt or turn, where it differs."""

    kind: Exactness = Exactness.EXACT
    reason: str = ""
    token: int | None = None


EXACT = Verdict()
"""The usual one."""
