"""Fields of requests and responses. Each is checked where it is read, so that an error names the field."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import orjson

from loopwright.core.errors import LoopwrightError
from loopwright.core.task import Message
from loopwright.engines.base import Tops
from loopwright.engines.tokenizer import Tokenizer
from loopwright.gateway.sessions.tool_calls import Tool

if TYPE_CHECKING:
    from loopwright.gateway.sessions.turn import Delta, Turn

MAX_CHOICES = MAX_STOPS = 128
_END_THINK = "</think>"
_MAX_REPR = 60
_OPENAI_ERRORS = {
    "invalid": ("invalid_request_error", None),
    "authentication": ("authentication_error", "invalid_api_key"),
    "permission": ("invalid_request_error", "insufficient_permissions"),
    "not_found": ("invalid_request_error", "not_found"),
    "too_large": ("invalid_request_error", "request_too_large"),
    "closed": ("invalid_request_error", "session_closed"),
    "quota": ("insufficient_quota", "insufficient_quota"),
    "context": ("invalid_request_error", "context_length_exceeded"),
    "state": ("invalid_request_error", "previous_response_not_found"),
    "engine": ("server_error", "engine_error"),
    "internal": ("server_error", "internal_error"),
}


class BadRequest(LoopwrightError, ValueError):
    """A request that cannot be served as it is; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class StateNotFound(BadRequest):
    """A request refers to something that its session does not have."""


# -- requests -------------------------------------------------------------------------------------------------------


def text(value: Any, where: str) -> str:
    """A text."""
    if not isinstance(value, str):
        raise BadRequest(f"{where}: expected a text, got {short_repr(value)}", where)
    return value


def non_empty_text(value: Any, where: str) -> str:
    """A text that is not empty."""
    if not text(value, where):
        raise BadRequest(f"{where}: must not be empty", where)
    return str(value)


def objects(value: Any, where: str, start: int = 0) -> list[Mapping[str, Any]]:
    """A list of objects, from this index on; empty if it is missing."""
    if value is not None and not isinstance(value, list):
        raise BadRequest(f"{where}: expected a list, got {short_repr(value)}", where)
    items = (value or [])[start:]
    if set(map(type, items)) - {dict}:
        index, item = next((index, item) for index, item in enumerate(items, start) if not isinstance(item, dict))
        raise BadRequest(f"{where}.{index}: expected an object, got {short_repr(item)}", f"{where}.{index}")
    return items


def optional_flag(body: Mapping[str, Any], name: str) -> bool | None:
    """True or false, or None if it is missing."""
    value = body.get(name)
    if value and not isinstance(value, bool):
        raise BadRequest(f"{name}: expected true or false, got {short_repr(value)}", name)
    return None if value is None else bool(value)


def flag(body: Mapping[str, Any], name: str) -> bool:
    """True or false; false if it is missing."""
    return bool(optional_flag(body, name))


def integer(body: Mapping[str, Any], name: str, minimum: int | None = None, maximum: int | None = None) -> int | None:
    """An integer within bounds, or None if it is missing."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(f"{name}: expected an integer", name)
    if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
        raise BadRequest(f"{name}: expected {minimum} to {maximum}, got {value}", name)
    return value


def model(body: Mapping[str, Any]) -> str:
    """The model's name, which may be any: a session has one engine."""
    return text(body.get("model") or "", "model")


def openai_stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    """The stop strings of an OpenAI request: one, several, or none."""
    value = body.get("stop")
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise BadRequest("stop: expected a text or a list of texts", "stop")
    return checked_stops(stop for stop in stops if stop)


def checked_stops(stops: Iterable[str]) -> tuple[str, ...]:
    """Stop strings, which are searched for after each token."""
    result = tuple(stops)
    if len(result) > MAX_STOPS:
        raise BadRequest(f"stop: at most {MAX_STOPS} texts, got {len(result)}", "stop")
    return result


def includes_usage(body: Mapping[str, Any]) -> bool:
    """Whether an OpenAI stream ends with its usage."""
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequest("stream_options: expected an object", "stream_options")
    return bool((options or {}).get("include_usage"))


def function(name: Any, description: Any, parameters: Any, where: str) -> Tool:
    """A tool in OpenAI's chat format."""
    tool: dict[str, Any] = {"name": non_empty_text(name, f"{where}.name")}
    if description is not None:
        tool["description"] = text(description, f"{where}.description")
    tool["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    to_json(tool["parameters"], f"{where}.parameters")
    return {"type": "function", "function": tool}


def tool_call(id: Any, name: Any, arguments: str, where: str) -> Message:
    """A tool call in OpenAI's chat format."""
    function = {"name": non_empty_text(name, f"{where}.name"), "arguments": arguments}
    return {"id": text(id, f"{where}.id"), "type": "function", "function": function}


def to_json(value: Any, where: str) -> str:
    """An object as JSON; one that is too deep to be parsed again is refused."""
    if not isinstance(value, dict):
        raise BadRequest(f"{where}: expected an object, got {short_repr(value)}", where)
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        if "ecursion" in str(error):
            raise BadRequest(f"{where}: nested too deeply", where) from error
    return json.dumps(value, ensure_ascii=False)  # which supports integers of more than 64 bits


def storable_json(value: Any, where: str) -> bytes:
    """A value as JSON that can be written within the record of a turn, which adds a few levels."""
    try:
        return orjson.dumps([[[[[[[[value]]]]]]]])[8:-8]
    except orjson.JSONEncodeError as error:
        raise BadRequest(f"{where}: nested too deeply", where) from error


def unsupported_content(kind: str, where: str) -> BadRequest:
    """The error for content that is not text."""
    subject = "images are" if "image" in kind else f"{kind!r} is"
    return BadRequest(f"{where}: {subject} not supported: only text can be shown to this model", where)


def join_blocks(texts: Sequence[str]) -> str:
    """Separate blocks of text as one text."""
    return "\n\n".join(texts)


def short_repr(value: Any) -> str:
    """A value in an error message."""
    result = repr(value)
    return result if len(result) <= _MAX_REPR else f"{result[:_MAX_REPR]}…"


# -- responses ------------------------------------------------------------------------------------------------------


def event(kind: str, data: Mapping[str, Any]) -> bytes:
    """A server-sent event with its name."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(data))


def openai_error(message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's SDK expects it."""
    type_, code = _OPENAI_ERRORS.get(kind, ("server_error", None))
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def now() -> int:
    """The time of a response, in seconds since the epoch."""
    return int(time.time())


def usage(turns: Sequence["Turn"], n: int) -> dict[str, Any]:
    """The tokens of an OpenAI completion; each `n` choices share their prompt."""
    prompt, sampled = sum(turn.prompt_tokens for turn in turns[::n]), sum(turn.sampled_tokens for turn in turns)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": sum(turn.cached_tokens for turn in turns[::n])},
    }


def token_fields(turn: "Turn") -> dict[str, Any]:
    """Ids and logprobs of a turn, for APIs that have no fields of their own for them."""
    return {"prompt_token_ids": turn.prompt_ids, "token_ids": turn.ids, "token_logprobs": turn.logprobs}


def content_logprobs(tokenizer: Tokenizer, sampled: "Turn | Delta", top: int, *, streamed: bool) -> dict[str, Any]:
    """`logprobs` of a chat completion: an entry for each token of the text, whose tokens joined are the text.

    If the engine returns no alternatives, `top_logprobs` contains the sampled token.
    """
    tokens, text = tokenizer.pieces(sampled.ids), sampled.text
    joined = "".join(tokens)
    after = joined.find(_END_THINK) + 1 if sampled.reasoning else 0
    # In a turn, calls may follow the text; the text of a delta comes last.
    start = max(joined.rfind(text) if streamed else joined.find(text, after), 0)
    content, end = [], 0
    for index, (token, logprob) in enumerate(zip(tokens, sampled.logprobs, strict=True)):
        at, end = end, end + len(token)
        # A token without text is the rest of the character before it.
        if end > start and at < start + len(text) + (not token):
            entry = _logprob_entry(token, logprob)
            others = [_logprob_entry(*other) for other in alternatives(tokenizer, sampled.tops, index, top)]
            content.append({**entry, "top_logprobs": (others or [entry]) if top else []})
    return {"content": content, "refusal": None}


def alternatives(tokenizer: Tokenizer, tops: Tops | None, index: int, top: int) -> list[tuple[str, float]]:
    """The most likely tokens at a position, as text; empty if the engine does not return them."""
    entries = tops[index][:top] if tops is not None else ()
    return [(tokenizer.pieces([token])[0], logprob) for token, logprob in entries]


def _logprob_entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": _bytes(token)}


@lru_cache(maxsize=2**16)
def _bytes(token: str) -> list[int]:
    return list(token.encode("utf-8", "replace"))
