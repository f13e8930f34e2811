"""A turn: one call of a session, and what came of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loopwright.core.task import Message


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy said, as a message and as tokens."""

    message: Message
    finish: str
    node: int
    prompt_tokens: int
    sampled_tokens: int
    malformed: tuple[str, ...] = ()
    """Tool calls in it that nobody can read."""
    ids: tuple[int, ...] = ()
    """The tokens that were sampled, the end included, and their logprobs."""
    logprobs: tuple[float, ...] = ()
    stopped_by: str | None = None
    """The stop string that ended it."""

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """The tool calls of the message."""
        return self.message.get("tool_calls") or ()

    @property
    def text(self) -> str:
        """The text of the message."""
        return str(self.message["content"] or "")
