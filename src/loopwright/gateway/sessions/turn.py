"""A turn: one call of a session, and what came of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loopwright.core.task import Message
from loopwright.engines.base import Tops


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
    tops: Tops | None = None
    """What else was likely at each token, where the engine was asked."""
    unshown: tuple[int, int] = (0, 0)
    """Characters of reasoning and of text that the client gave itself."""

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """The tool calls of the message."""
        return self.message.get("tool_calls") or ()

    @property
    def text(self) -> str:
        """The text of the message, without what the client gave itself."""
        return str(self.message["content"] or "")[self.unshown[1] :]

    @property
    def thought(self) -> str:
        """The reasoning of the message, likewise."""
        return str(self.message.get("reasoning_content") or "")[self.unshown[0] :]
