"""A dialect: how one API writes what an agent asks and what the policy says. Parse → one internal turn → render.

A dialect holds no state and never sees the engine. `ROUTES` says which one serves which path below a session.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from loopwright.core.errors import LoopwrightError
from loopwright.core.task import Message
from loopwright.engines.base import Sampling
from loopwright.engines.tokenizer import Tokenizer
from loopwright.gateway.sessions.calls import Grammar
from loopwright.gateway.sessions.manner import PLAIN, Manner
from loopwright.gateway.sessions.pieces import Delta as Delta
from loopwright.gateway.sessions.template import Tool

if TYPE_CHECKING:
    from loopwright.gateway.sessions.session import Turn
    from loopwright.gateway.sessions.wish import Wish

ROUTES = {
    "v1/chat/completions": "loopwright.gateway.dialects.chat:ChatCompletions",
    "v1/completions": "loopwright.gateway.dialects.completions:Completions",
    "v1/responses": "loopwright.gateway.dialects.responses:Responses",
    "v1/messages": "loopwright.gateway.dialects.messages:Messages",
    "v1/v1/messages": "loopwright.gateway.dialects.messages:Messages",
    "messages": "loopwright.gateway.dialects.messages:Messages",
}
"""The path below `/{session}` and the dialect there; `count_tokens` below a path is asked of its dialect too."""


class BadRequest(LoopwrightError, ValueError):
    """A request that nobody can answer as it is; `param` names the field to blame."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What an agent asks for, whichever dialect it speaks."""

    messages: Sequence[Message]
    """In OpenAI's chat format. Raw text to go on from is one message with the role `prompt`: a text or ids."""
    sampling: Sampling
    """What was asked for over the session's own; its `stop` is always empty."""
    tools: Sequence[Tool] = ()
    """As OpenAI describes functions."""
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    include_usage: bool = False
    model: str = ""
    seed: int | None = None
    wish: "Wish | None" = None
    """What it wishes of the turn beyond that."""

    def manner(self, grammar: Grammar) -> Manner:
        """How to open and read the turn."""
        return PLAIN if self.wish is None else self.wish.manner(grammar)


class StreamWriter(ABC):
    """Writes one answer as server-sent events."""

    @abstractmethod
    def begin(self, prompt_tokens: int) -> bytes:
        """What comes before the first piece."""

    @abstractmethod
    def piece(self, choice: int, piece: Delta) -> bytes:
        """The next piece of a choice; nothing (b"") where there is nothing to show."""

    @abstractmethod
    def end(self, turns: Sequence["Turn"]) -> bytes:
        """What tells that the answer is complete: sent once every turn is committed."""

    @abstractmethod
    def fail(self, message: str, *, kind: str) -> bytes:
        """An error in mid-stream, such that the SDK raises; `kind` is one of those of `Dialect.error`."""

    def keepalive(self) -> bytes:
        """A comment, which every client skips."""
        return b": keepalive\n\n"


class Dialect(ABC):
    """One API's way of writing. `defaults` is the session's own sampling, over which a request lays what it says."""

    name: ClassVar[str]

    def __init__(self, tokenizer: Tokenizer, defaults: Sampling) -> None:
        self.tokenizer, self.defaults = tokenizer, defaults

    @abstractmethod
    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> TurnRequest:
        """What is asked for; BadRequest if that cannot be told or done. Unknown fields are let through."""

    @abstractmethod
    def render(self, ask: TurnRequest, call_id: str, turns: Sequence["Turn"]) -> dict[str, Any]:
        """The whole answer; a turn per choice."""

    @abstractmethod
    def stream(self, ask: TurnRequest, call_id: str) -> StreamWriter:
        """A writer for the answer as a stream."""

    @abstractmethod
    def error(self, status: int, message: str, *, kind: str, param: str | None = None) -> dict[str, Any]:
        """The body of a refusal, in the shape that this API's SDK knows.

        `kind` is one of ours: invalid, authentication, not_found, too_large, closed, quota, context, engine, internal.
        """

    def counted(self, tokens: int) -> dict[str, Any]:
        """The answer to `count_tokens`."""
        return {"input_tokens": tokens}
