"""The child's side of the body worker: parses large request bodies, and renders and tokenises their messages.

It answers one job at a time, over pipes, until its parent closes them. What it computes saves the gateway work: a body
that it does not understand is parsed by the gateway again. It refuses only what is too large in any case.
"""

import gc
import os
import pickle
import struct
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Literal

from loopwright.engines.base import ContextFull, Reasoning, Sampling
from loopwright.engines.tokenizer import HubTokenizer, Tokenizer
from loopwright.gateway.dialects.base import BodyReader, BodyStart, Dialect, TurnRequest
from loopwright.gateway.dialects.fields import BadRequest
from loopwright.gateway.sessions.model_template import template_of
from loopwright.gateway.sessions.session import PromptRenderer

HEADER = struct.Struct(">QQ")
"""Before each message: how long its description and its body are."""
_MAX_VALUES = 200_000
"""JSON values of a body, besides the tokens of a prompt that is a list of ids."""
_MAX_SETTINGS, _MAX_SETTINGS_CHARS = 50_000, 2**22
"""JSON values and text of a body besides its conversation, such as tools."""
_SLICE_CHARS = 2**16
_CACHE_BYTES = 2**26
"""Ids of texts that are remembered: an agent sends its whole conversation in every request."""
_MAX_RESIDENT_BYTES = 2**29
"""Memory with which the process ends: the next body gets a new one."""


@dataclass(frozen=True, slots=True)
class RenderSettings:
    """What all sessions of a gateway share."""

    tokenizer: bytes
    """Pickled."""
    template: str
    reasoning: Reasoning | None
    thinks: bool | None


@dataclass(frozen=True, slots=True)
class BodyJob:
    """A body to prepare, which is sent beside it."""

    dialect: type[Dialect]
    defaults: Sampling
    max_context: int | None
    max_recorded: int | None
    """Tokens that the session may record."""


@dataclass(frozen=True, slots=True)
class PreparedBody:
    """The content of a body, and what is known about it."""

    content: dict[str, Any]
    digest: bytes
    start: BodyStart | None
    encodings: dict[bytes, Sequence[int]] = field(default_factory=dict)
    """The ids of its texts, by `text_digest`."""

    def used_by(self, tokenizer: Tokenizer) -> AbstractContextManager[None]:
        """Let a tokenizer use these ids; other texts are encoded as usual."""
        if not isinstance(tokenizer, HubTokenizer):
            return nullcontext()
        return tokenizer.looking_up(lambda text: self.encodings.get(text_digest(text)))


@dataclass(frozen=True, slots=True)
class BodyRefusal:
    """Why a body is refused."""

    kind: Literal["invalid", "context", "too_large", "failed"]
    message: str = ""
    param: str | None = None
    limit: int = 0
    length: int = 0


def text_digest(text: str) -> bytes:
    """Identifies a text."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class BodyPreparer:
    """Prepares bodies; remembers the ids of texts."""

    def __init__(self, settings: RenderSettings) -> None:
        tokenizer: Tokenizer = pickle.loads(settings.tokenizer)  # noqa: S301  from the parent
        self._tokenizer = tokenizer
        template, forks = template_of(settings.template, tokenizer), settings.reasoning == "fork"
        self._prompts = PromptRenderer(template, forks, bool(settings.thinks))
        self._cache: OrderedDict[bytes, Sequence[int]] = OrderedDict()
        self._cached_bytes = 0

    def prepare(self, job: BodyJob, body: bytes) -> PreparedBody | BodyRefusal:
        """Parse and render a body."""
        dialect = job.dialect(self._tokenizer, job.defaults, self._prompts.template.grammar)
        try:
            reader = BodyReader(dialect.name)
            content, digest = reader.read(body)
            prepared = PreparedBody(content, digest, reader.start)
            request = self._check(job, dialect, content)
        except BadRequest as error:
            return BodyRefusal("invalid", str(error), error.param)
        except ContextFull as error:
            return BodyRefusal("context", limit=error.limit, length=error.length)
        except (_TooLargeError, MemoryError) as error:
            return BodyRefusal("too_large", str(error) or "the request takes too much memory")
        if request is not None and isinstance(self._tokenizer, HubTokenizer):  # others take no time
            self._render(request, self._tokenizer, prepared.encodings)
        return prepared

    def _check(self, job: BodyJob, dialect: Dialect, content: dict[str, Any]) -> TurnRequest | None:
        """The request, if it can be parsed without its session. Raises if it is too large in any case."""
        limit = min((each for each in (job.max_context, job.max_recorded) if each is not None), default=2**31)
        conversation = [content[name] for name in dialect.conversation_fields if name in content]
        settings = [value for name, value in content.items() if name not in dialect.conversation_fields]
        all_texts = list(_texts(conversation, _MAX_VALUES + limit))
        if sum(map(len, _texts(settings, _MAX_SETTINGS))) > _MAX_SETTINGS_CHARS:
            raise _TooLargeError(f"the request has more than {_MAX_SETTINGS_CHARS} characters besides its messages")
        try:
            request = dialect.parse(content)
        except BadRequest:  # perhaps because it refers to what its session has recorded
            if self._estimate(all_texts, limit) >= limit:
                raise
            return None
        contents = [[message["content"] for message in each] for each in request.conversations]
        if (length := max(self._estimate(each, limit) for each in contents)) < limit:
            return request
        if limit == job.max_context:
            raise ContextFull(limit, length)
        raise _TooLargeError(f"the prompt has at least {length} tokens, and the session may record {limit}")

    def _estimate(self, contents: Sequence[Any], limit: int) -> int:
        """How many tokens texts or ids have at least. Texts that are too long in any case are not tokenised."""
        texts = [content for content in contents if isinstance(content, str)]
        count = sum(len(content) for content in contents if isinstance(content, list))
        size = sum(len(text.encode("utf-8", "replace")) for text in texts)
        longest: int | None = getattr(self._tokenizer, "max_token_bytes", None)
        if longest is not None and (length := count + -(-size // longest)) >= limit:
            return length
        if size > 2 * limit:
            # A cut in a text changes a few tokens around it: a quarter more than the limit is too long in any case.
            for text in texts:
                for start in range(0, len(text), _SLICE_CHARS):
                    count += len(self._tokenizer.encode(text[start : start + _SLICE_CHARS]))
                    if count > limit + limit // 4:
                        return count
            return 0
        return count

    def _render(self, request: TurnRequest, tokenizer: HubTokenizer, encodings: dict[bytes, Sequence[int]]) -> None:
        """Collect the ids of all texts that rendering the request encodes."""

        def look_up(text: str) -> Sequence[int]:
            key = text_digest(text)
            if key in self._cache:
                self._cache.move_to_end(key)
            else:
                with tokenizer.looking_up(lambda _: None):
                    self._cache[key] = array("q", tokenizer.encode(text))
                self._cached_bytes += 8 * len(self._cache[key])
            encodings[key] = self._cache[key]
            return self._cache[key]

        # ValueError: the gateway finds the same, and says so.
        with suppress(ValueError), tokenizer.looking_up(look_up):
            for conversation in request.conversations:
                self._prompts.ids(conversation, request.tools, request.options)
        while self._cached_bytes > _CACHE_BYTES:
            self._cached_bytes -= 8 * len(self._cache.popitem(last=False)[1])


class _TooLargeError(ValueError):
    """A body is too large, whatever its session has recorded."""


def _texts(value: Any, max_values: int) -> Iterator[str]:
    """All texts in a value, those of keys excepted. _TooLargeError if it has too many values."""
    pending, count = [value], 0
    while pending:
        item = pending.pop()
        count += 1
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, list):
            pending += item
        if count + len(pending) > max_values:
            raise _TooLargeError(f"the request has more than {max_values} JSON values")


def serve(requests: BinaryIO, responses: BinaryIO) -> None:
    """Answer jobs until the pipe is closed, or this process has grown too large."""
    preparer: BodyPreparer | None = None
    while header := requests.read(HEADER.size):
        description_size, body_size = HEADER.unpack(header)
        # Between a process and its child; what a client has sent is in the body, which is never unpickled.
        job = pickle.loads(requests.read(description_size))  # noqa: S301
        body = requests.read(body_size)
        reply: PreparedBody | BodyRefusal | None = None
        try:
            if isinstance(job, RenderSettings):
                preparer = BodyPreparer(job)
                continue
            if preparer is not None:
                reply = preparer.prepare(job, body)
        except Exception as error:  # noqa: BLE001  reported to the gateway, which logs it
            reply = BodyRefusal("failed", f"{type(error).__name__}: {error}")
        data = pickle.dumps(reply, protocol=pickle.HIGHEST_PROTOCOL)
        responses.write(HEADER.pack(len(data), 0) + data)
        responses.flush()
        del job, body, reply, data
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        if resident_pages * os.sysconf("SC_PAGE_SIZE") > _MAX_RESIDENT_BYTES:
            return


def main() -> None:
    """Serve the pipes that this process was started with."""
    # Calls of other sessions come first. Linux shares the processor between sessions of processes before it looks at
    # `nice`, and this process has a session of its own.
    os.nice(5)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("5")
    gc.disable()  # what it allocates has no cycles, and millions of values would be searched for them again and again
    with os.fdopen(0, "rb") as requests, os.fdopen(os.dup(1), "wb") as responses:
        os.dup2(2, 1)  # nothing that prints may disturb the responses
        sys.stdout = sys.stderr
        serve(requests, responses)
