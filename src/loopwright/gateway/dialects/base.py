"""A dialect: how one API writes requests and responses. Parse → one internal turn → render.

Each session has its own instance of a dialect, which never sees the engine.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import orjson

from loopwright.core.task import Message
from loopwright.engines.base import Sampling
from loopwright.engines.tokenizer import Tokenizer
from loopwright.gateway.dialects.body import BodyReader
from loopwright.gateway.dialects.fields import openai_error
from loopwright.gateway.sessions.tool_calls import HERMES, Grammar, Tool
from loopwright.gateway.sessions.turn import Delta, Turn
from loopwright.gateway.sessions.turn_options import PLAIN, TurnOptions


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What an agent asks for, in any dialect."""

    messages: Sequence[Message]
    """In OpenAI's chat format. Raw text to continue is one message with the role `prompt`: a text or ids."""
    sampling: Sampling
    """The session's default sampling, overridden by the request; its `stop` is always empty."""
    tools: Sequence[Tool] = ()
    """In OpenAI's format."""
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    include_usage: bool = False
    model: str = ""
    seed: int | None = None
    options: TurnOptions = PLAIN
    """How to prompt and parse the turn."""


class StreamWriter(ABC):
    """Writes one response as server-sent events."""

    @abstractmethod
    def begin(self, prompt_tokens: int) -> bytes:
        """What precedes the first delta."""

    @abstractmethod
    def delta(self, choice: int, delta: Delta) -> bytes:
        """The next delta of a choice; b"" if there is nothing to show."""

    @abstractmethod
    def end(self, turns: Sequence[Turn]) -> bytes:
        """What completes the response: sent when every turn is committed."""

    @abstractmethod
    def fail(self, message: str, *, kind: str) -> bytes:
        """An error in mid-stream, for which the SDK raises; `kind` as in `Dialect.error`."""

    def keepalive(self) -> bytes:
        """A comment, which every client skips."""
        return b": keepalive\n\n"


class Dialect(ABC):
    """One API's requests and responses. `defaults` is the session's default sampling, which a request overrides."""

    name: ClassVar[str]
    conversation_fields: ClassVar[tuple[str, ...]] = ("messages",)
    """The fields that change from turn to turn; all others are settings."""

    def __init__(self, tokenizer: Tokenizer, defaults: Sampling, grammar: Grammar = HERMES) -> None:
        self.tokenizer, self.defaults, self.grammar = tokenizer, defaults, grammar
        self.bodies = BodyReader(self.name)
        self._settings: tuple[bytes, TurnRequest] | None = None

    def parse(self, body: Mapping[str, Any]) -> TurnRequest:
        """The turn that is asked for. BadRequest if a field is wrong or not supported; unknown fields are ignored."""
        messages = self.parse_messages(body)
        settings = {name: value for name, value in body.items() if name not in self.conversation_fields}
        try:
            settings_json = orjson.dumps(settings)
        except orjson.JSONEncodeError:  # nested too deeply, which may be an error in one of the fields
            return self.parse_settings(settings, messages)
        # An agent sends the same settings with every request, so they are parsed once.
        if self._settings is None or self._settings[0] != settings_json:
            self._settings = settings_json, self.parse_settings(settings, messages)
        return replace(self._settings[1], messages=messages)

    @abstractmethod
    def parse_messages(self, body: Mapping[str, Any]) -> Sequence[Message]:
        """The conversation of a request, in OpenAI's chat format."""

    @abstractmethod
    def parse_settings(self, body: Mapping[str, Any], messages: Sequence[Message]) -> TurnRequest:
        """A request with these messages and the settings of the body."""

    @abstractmethod
    def render(self, request: TurnRequest, call_id: str, turns: Sequence[Turn]) -> dict[str, Any]:
        """The complete response, with one turn per choice."""

    @abstractmethod
    def stream(self, request: TurnRequest, call_id: str) -> StreamWriter:
        """A writer for the response as a stream."""

    def error(self, message: str, *, kind: str, param: str | None = None) -> dict[str, Any]:
        """The body of an error, as this API's SDK expects it; by default in OpenAI's format.

        `kind` is one of: invalid, authentication, not_found, too_large, closed, quota, context, engine, internal.
        """
        return openai_error(message, kind, param)
