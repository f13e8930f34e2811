"""A dialect: how one API writes requests and responses. Parse → one internal turn → render.

Each session has its own instance of a dialect, which never sees the engine.

Request bodies: an agent sends its whole conversation in every turn, and only what is new of it is parsed.

A body that starts with the bytes of an earlier one, up to the end of a message, is parsed from there. Equal bytes mean
the same only at the same place, so they are compared from the first byte up to the end of an object in the list of
messages, and what follows must be valid JSON there. Everything else is parsed completely. No JSON library can resume
parsing in the middle of a document, hence the scanning for the end of a message is done here.
"""

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import orjson

from loopwright.core.task import Message
from loopwright.engines.base import Sampling
from loopwright.engines.tokenizer import Tokenizer
from loopwright.gateway.dialects.fields import BadRequest, flag, openai_error, storable_json
from loopwright.gateway.dialects.known_fields import KnownFields, ignored_tool_fields, recordable
from loopwright.gateway.dialects.response_items import ToolOrigin
from loopwright.gateway.dialects.sampling_fields import template_arguments
from loopwright.gateway.sessions.graph import RAW
from loopwright.gateway.sessions.tool_calls import HERMES, Grammar, Tool
from loopwright.gateway.sessions.turn import Delta, Turn
from loopwright.gateway.sessions.turn_options import PLAIN, TurnOptions

_MAX_PREFIXES, _MAX_BYTES = 4, 2**22
"""Conversations of a session that are remembered by their bytes, and how many bytes each may have."""
_MAX_TAIL_BYTES = 2**16
"""What is remembered of the fields after a conversation."""
_MAX_TOOLS = 1024
_LISTS = (b'"messages"', b'"input"')
"""The dialects' names for the list that grows."""
_SPACE, _BRACE = b" \t\r\n", ord("}")
_TOKEN = re.compile(rb'"(?:[^"\\]+|\\.)*+"|[][{}]', re.DOTALL)
_FLAT = re.compile(rb'(?:[ \t\r\n,]*+\{(?:[^][{}"]++|"(?:[^"\\]+|\\.)*+")*+\})*+(?=[ \t\r\n]*+\])', re.DOTALL)
"""Messages without inner lists or objects, as most are, up to the end of their list."""
_LIST_START = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*\[")
# A name that no request can contain, because it is random.
_REST = secrets.token_hex(16)
_OPEN = b'{"%b":[' % _REST.encode()


class TurnRequest(NamedTuple):  # created faster than a dataclass
    """What an agent asks for, in any dialect."""

    messages: Sequence[Message]
    """In OpenAI's chat format. Raw text to continue is a message with the role `prompt`: a text or ids."""
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
    continues: bool = False
    """Whether the last message is the start of the turn."""
    return_token_ids: bool = False
    """Whether the response contains the ids of prompt and turn."""
    tool_origins: Mapping[str, ToolOrigin] = MappingProxyType({})
    """How the client described tools that are not plain functions, by the name that the policy knows."""
    echo: Mapping[str, Any] = MappingProxyType({})
    """Fields that the response repeats."""
    conversation: str = ""
    """The stored conversation that this is a turn of."""
    has_instructions: bool = False
    """Whether the first message is for this turn only."""
    recorded: Mapping[str, Any] = MappingProxyType({})
    """What a stored response needs to know of the request."""
    calls_functions: bool = False
    """Whether the client sends `functions`, and gets a `function_call` rather than tool calls."""
    branch: str = ""
    """The client's name for the conversation, such as that of a sub-agent."""
    ignored: Mapping[str, Any] = MappingProxyType({})
    """Fields without effect here that the client may rely on; they are recorded, and named in the response."""

    @property
    def conversations(self) -> list[Sequence[Message]]:
        """The messages of each conversation: raw prompts are one each."""
        is_raw = bool(self.messages) and self.messages[0].get("role") == RAW
        return [[message] for message in self.messages] if is_raw else [self.messages]


def continue_message(request: TurnRequest) -> TurnRequest:
    """A request whose last message is the start of the turn (a prefill), which the policy continues."""
    *messages, last = request.messages
    if last["role"] != "assistant":
        raise BadRequest("continue_final_message: the last message is not the assistant's", "continue_final_message")
    if last.get("tool_calls") or last.get("reasoning_content"):
        raise BadRequest("messages: only text can be prefilled; end with a user message", "messages")
    if not messages:
        raise BadRequest("messages: a prefill needs a message before it", "messages")
    options, prefill = request.options, str(last["content"])
    if prefill:
        if options.prefill and options.parse_tool_calls:
            raise BadRequest("tool_choice: a turn with a prefill cannot start with a call", "tool_choice")
        options = replace(options, prefill=prefill, prefill_visible=False)
    return request._replace(messages=messages, options=options)


class StreamWriter(ABC):
    """Writes one response as server-sent events."""

    prompts: Sequence[tuple[int, ...]] = ()
    """The prompt of each choice, for clients that ask for token ids."""

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


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation of the session, up to a turn that a request refers to."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    has_instructions: bool = False
    """Whether the first message was for that turn only."""


class History(Protocol):
    """What a session has stored, for requests that refer to it."""

    def turn(self, call_id: str) -> StoredConversation | None:
        """The conversation up to the turn of a finished call."""
        ...

    def message(self, call_id: str) -> Message | None:
        """The turn of a finished call alone: a request may refer to hundreds of them."""
        ...

    def conversation(self, id: str) -> StoredConversation | None:
        """The conversation of this id, up to its last turn."""
        ...


class _NoHistory:
    """Of a dialect without a session."""

    def turn(self, call_id: str) -> None: ...

    def message(self, call_id: str) -> None: ...

    def conversation(self, id: str) -> None: ...


class Dialect(ABC):
    """One API's requests and responses. `defaults` is the session's default sampling, which a request overrides."""

    name: ClassVar[str]
    known_fields: ClassVar[KnownFields]
    """What happens to each field."""
    message_fields: ClassVar[frozenset[str]] = frozenset()
    """The fields of a message that are read, where others are ignored and named."""
    conversation_fields: ClassVar[tuple[str, ...]] = ("messages",)
    """The fields that change from turn to turn; all others are settings."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        defaults: Sampling,
        grammar: Grammar = HERMES,
        history: History = _NoHistory(),  # noqa: B008  it has no state
    ) -> None:
        self.tokenizer, self.defaults, self.grammar, self.history = tokenizer, defaults, grammar, history
        self.bodies = BodyReader(self.name)
        self._settings: tuple[bytes, TurnRequest] | None = None

    def parse(self, body: Mapping[str, Any]) -> TurnRequest:
        """The turn that is asked for. BadRequest if a field is wrong or not supported."""
        messages = self.parse_messages(body)
        settings = {name: value for name, value in body.items() if name not in self.conversation_fields}
        try:
            settings_json = storable_json(settings, "body")
        except BadRequest:  # one field at a time, to name it
            for name, value in settings.items():
                storable_json({name: value}, name)
            raise
        # An agent sends the same settings with every request, so they are parsed once.
        if self._settings is None or self._settings[0] != settings_json:
            self._settings = settings_json, self._parse_settings(settings, messages)
        request = TurnRequest(messages, *self._settings[1][1:])
        if self.message_fields and not self.bodies.is_plain:
            others = [message for message in body["messages"] if len(message) > 2]
            values = {name: value for message in others for name, value in message.items() if value}
            notes = {
                f"messages.{name}": recordable(values[name]) for name in sorted(values.keys() - self.message_fields)
            }
            request = request._replace(ignored={**request.ignored, **notes})
        return continue_message(request) if request.continues else request

    def _parse_settings(self, settings: Mapping[str, Any], messages: Sequence[Message]) -> TurnRequest:
        settings = {name: value for name, value in settings.items() if value not in ({}, [])}  # which say nothing
        ignored = self.known_fields.ignored(settings)
        for name in ("tools", "functions"):
            if isinstance(tools := settings.get(name), list) and len(tools) > _MAX_TOOLS:
                raise BadRequest(f"{name}: at most {_MAX_TOOLS}, got {len(tools)}", name)
            ignored |= ignored_tool_fields(tools)
        request = self.parse_settings(settings, messages)
        options = replace(request.options, chat_template_kwargs=template_arguments(settings))
        return_ids = flag(settings, "return_token_ids")
        ignored = {**ignored, **request.ignored}
        return request._replace(options=options, return_token_ids=return_ids, ignored=ignored)

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

        `kind` is one of: invalid, authentication, permission, not_found, too_large, closed, quota, context, engine,
        internal.
        """
        return openai_error(message, kind, param)


# -- request bodies -----------------------------------------------------------------------------------------------


def parse_object(body: bytes, *, allow_empty: bool = False) -> dict[str, Any]:
    """The JSON object in the body of a request; {} if the body is empty and may be."""
    if allow_empty and not body.strip():
        return {}
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise BadRequest("the body is not a JSON object")
    return data


BodyStart = tuple[dict[str, Any], str, int]
"""The fields before the list of messages, the name of the list, and where its last message ends."""


@dataclass(slots=True, eq=False)
class _Prefix:
    """The start of a body: its bytes up to the end of a message, and what they contain."""

    data: bytes | memoryview
    digest: blake2b
    fields: dict[str, Any]
    name: str
    items: list[Any]
    tail: bytes = b""
    """What followed it, if that was short: the end of the list, and the fields after it."""
    tail_fields: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    """The items as the dialect has parsed them, if it remembers that."""
    is_plain: bool = True
    """Whether these have only a role and content."""

    def parse(self, body: bytes) -> tuple[list[Any], dict[str, Any], int | None] | None:
        """All items of a body that starts like this, the fields after them, and where the last one ends, if known.

        None if the body has to be parsed completely.
        """
        start, end = len(self.data), len(body) - len(self.tail)
        rest = body[start:].lstrip(_SPACE)
        if self.tail and start < end and body.endswith(self.tail) and rest.startswith(b",") and body[end - 1] == _BRACE:
            # Mostly only messages were added. That nothing else is found up to there proves that they end there.
            with suppress(orjson.JSONDecodeError):
                added = orjson.loads(b"%b%b]}" % (_OPEN, rest[1 : len(rest) - len(self.tail)]))
                if len(added) == 1:
                    return [*self.items, *added[_REST]], self.tail_fields, end
        comma = bool(self.items) and rest.startswith(b",")
        try:
            fields = orjson.loads(_OPEN + rest[comma:])
        except orjson.JSONDecodeError:
            return None  # the error must name its position in the whole body
        items = fields.pop(_REST)
        # A comma at the end of the list, none between messages, or a second list that would replace this one.
        if (self.items and comma != bool(items)) or self.name in fields:
            return None
        return [*self.items, *items], fields, None


class BodyReader:
    """Parses the bodies of one session in one dialect. They share their content, so nobody may change it."""

    def __init__(self, dialect: str) -> None:
        self._new_digest = blake2b(digest_size=16, person=dialect.encode()[:16])
        self._prefixes: list[_Prefix] = []
        self._candidates: list[_Prefix] = []
        self.known: tuple[list[Any], list[Message], bool] = [], [], True
        """The items of the body read last, the messages of those parsed before, and whether these are plain."""
        self.is_plain = True
        """Whether the items remembered last have only a role and content, as most do."""

    def count_new(self, body: bytes) -> int:
        """How many bytes of a body have to be parsed."""
        return len(body) - max((len(p.data) for p in self._prefixes if body.startswith(p.data)), default=0)

    def remember(self, items: Sequence[Any], messages: list[Message]) -> None:
        """Remember how the items of the body that was read last were parsed, one message for each."""
        known_items, known, was_plain = self.known
        new = items[len(known) :] if items is known_items and was_plain else items
        self.is_plain = max(map(len, new), default=0) <= 2
        if self._candidates and self._candidates[0].items is items:
            self._candidates[0].messages[:], self._candidates[0].is_plain = messages, self.is_plain

    def keep(self) -> None:
        """Remember the body that was read last, whose request is accepted: the next one may start like it."""
        self._prefixes = self._candidates

    def forget(self) -> None:
        """Forget the body that was remembered last: its request was refused after all."""
        self._prefixes = self._prefixes[1:]

    @property
    def start(self) -> BodyStart | None:
        """The start of the body that was read last, if it can be remembered: for `adopt` in another process."""
        if not self._candidates:
            return None
        first = self._candidates[0]
        return first.fields, first.name, len(first.data)

    def adopt(self, body: bytes, content: Mapping[str, Any], start: BodyStart | None) -> None:
        """As if this body had been read here; `start` is from the reader that has read it."""
        self._candidates = self._prefixes
        if start is not None:
            fields, name, end = start
            digest = self._new_digest.copy()
            digest.update(body[:end])
            new = _Prefix(body[:end], digest, fields, name, content[name])
            self._candidates = [new, *self._prefixes[: _MAX_PREFIXES - 1]]

    def read(self, body: bytes) -> tuple[dict[str, Any], bytes]:
        """The content of a body, and a digest of its bytes. BadRequest if it is not a JSON object."""
        self._candidates = self._prefixes
        for prefix in self._prefixes:
            if body.startswith(prefix.data) and (parsed := prefix.parse(body)) is not None:
                content = {**prefix.fields, prefix.name: parsed[0], **parsed[1]}
                self.known = parsed[0], prefix.messages, prefix.is_plain
                return content, self._remember(prefix, body, *parsed)
        # Before its tokens are scanned: the search for the end of an unterminated string would take forever.
        data = parse_object(body)
        first = self._up_to_messages(body)
        if first is not None and (parsed := first.parse(body)) is not None:
            return data, self._remember(first, body, data[first.name], *parsed[1:])
        digest = self._new_digest.copy()
        digest.update(body)
        return data, digest.digest()

    def _up_to_messages(self, body: bytes) -> _Prefix | None:
        """The start of a body, up to its first message."""
        if len(body) > _MAX_BYTES or (start := _find_list(body)) is None:
            return None
        name, at = start
        fields, digest = orjson.loads(body[:at] + b"]}"), self._new_digest.copy()
        del fields[name]
        digest.update(body[:at])
        return _Prefix(body[:at], digest, fields, name, [])

    def _remember(
        self, prefix: _Prefix, body: bytes, items: list[Any], tail_fields: dict[str, Any], end: int | None
    ) -> bytes:
        """The digest of a body. The body up to its last message replaces its prefix, for the next request."""
        start, digest = len(prefix.data), prefix.digest.copy()
        end = _find_end(body, start) if end is None else end
        if end is not None and start < end <= _MAX_BYTES:
            digest.update(body[start:end])
            others = [each for each in self._prefixes if each is not prefix]
            has_short_tail = len(body) - end <= _MAX_TAIL_BYTES
            data = memoryview(body)[:end] if has_short_tail else body[:end]  # a view keeps all of the body in memory
            tail = (body[end:], tail_fields) if has_short_tail else ()
            new = _Prefix(data, digest.copy(), prefix.fields, prefix.name, items, *tail)
            self._candidates = [new, *others[: _MAX_PREFIXES - 1]]
            start = end
        digest.update(body[start:])
        return digest.digest()


def _find_list(body: bytes) -> tuple[str, int] | None:
    """The name of the list of messages, and where it starts."""
    depth = 0
    for token in _TOKEN.finditer(body):
        match token[0]:
            case b"{" | b"[":
                depth += 1
            case b"}" | b"]":
                depth -= 1
            case name if depth == 1 and name in _LISTS and (start := _LIST_START.match(body, token.end())):
                return name[1:-1].decode(), start.end()
    return None


def _find_end(body: bytes, start: int) -> int | None:
    """Where the last message of a list ends, from a position between messages; None if it is not an object."""
    if (flat := _FLAT.match(body, start)) is not None:
        return flat.end()
    depth, end = 0, start
    for token in _TOKEN.finditer(body, start):
        match token[0]:
            case b"{" | b"[":
                depth += 1
            case b"]" if depth == 0:
                return end if not body[end : token.start()].strip(_SPACE) else None
            case b"}" | b"]" as bracket:
                depth -= 1
                if depth == 0 and bracket == b"}":
                    end = token.end()
    return None
