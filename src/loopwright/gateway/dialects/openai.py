"""What OpenAI's dialects have in common: errors, usage, sampling fields, logprobs, and the shape of a stream."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from loopwright.engines.base import Sampling, Tops
from loopwright.engines.tokenizer import Tokenizer
from loopwright.gateway.dialects.base import BadRequest
from loopwright.gateway.dialects.fields import sampling

if TYPE_CHECKING:
    from loopwright.gateway.sessions.session import Turn

_KINDS = {
    "invalid": ("invalid_request_error", None),
    "authentication": ("authentication_error", "invalid_api_key"),
    "not_found": ("invalid_request_error", "not_found"),
    "too_large": ("invalid_request_error", "request_too_large"),
    "closed": ("invalid_request_error", "session_closed"),
    "quota": ("insufficient_quota", "insufficient_quota"),
    "context": ("invalid_request_error", "context_length_exceeded"),
    "engine": ("server_error", "engine_error"),
    "internal": ("server_error", "internal_error"),
}
_FIELDS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
DONE = b"data: [DONE]\n\n"
MOST_CHOICES = 128


def error_body(message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """An error as the SDK reads it."""
    type_, code = _KINDS.get(kind, ("server_error", None))
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def event(data: Mapping[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: %b\n\n" % orjson.dumps(data)


def now() -> int:
    """When an answer was made."""
    return int(time.time())


def sampling_of(defaults: Sampling, body: Mapping[str, Any], *limits: str) -> Sampling:
    """How to sample; the first of `limits` that is given says how many tokens."""
    limit = next((name for name in limits if body.get(name) is not None), limits[0])
    return sampling(defaults, body, {**_FIELDS, limit: "max_tokens"})


def with_tops(sampling: Sampling, top: int) -> Sampling:
    """The same, with what else was likely told at each token."""
    return sampling.model_copy(update={"top_logprobs": top}) if top else sampling


def stop_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """The stop strings: one, several, or none."""
    given = body.get("stop")
    stops = [given] if isinstance(given, str) else given or []
    if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
        raise BadRequest("stop: expected a text or a list of texts", "stop")
    return tuple(text for text in stops if text)


def integer(body: Mapping[str, Any], name: str, least: int | None = None, most: int | None = None) -> int | None:
    """A whole number within bounds, if it is given."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(f"{name}: expected a whole number", name)
    if (least is not None and value < least) or (most is not None and value > most):
        raise BadRequest(f"{name}: expected {least} to {most}, got {value}", name)
    return value


def includes_usage(body: Mapping[str, Any]) -> bool:
    """Whether a stream ends with its usage."""
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequest("stream_options: expected an object", "stream_options")
    return bool((options or {}).get("include_usage"))


def usage(turns: Sequence["Turn"]) -> dict[str, Any]:
    """What an answer took; choices share their prompt."""
    prompt, sampled = turns[0].prompt_tokens, sum(turn.sampled_tokens for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def content_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[float], top: int, tops: Tops | None = None
) -> dict[str, Any]:
    """`logprobs` of a chat completion: an entry for every token that was sampled, its end included.

    Where the engine does not tell what else was likely, `top_logprobs` holds the token that was sampled.
    """
    content = []
    for index, (text, logprob) in enumerate(zip(tokenizer.pieces(ids), logprobs, strict=True)):
        entry = _entry(text, logprob)
        others = [_entry(*other) for other in alternatives(tokenizer, tops, index, top)]
        content.append({**entry, "top_logprobs": (others or [entry]) if top else []})
    return {"content": content, "refusal": None}


def alternatives(tokenizer: Tokenizer, tops: Tops | None, index: int, top: int) -> list[tuple[str, float]]:
    """The likeliest tokens at a position, as text; none where the engine does not tell."""
    found = tops[index][:top] if tops is not None else ()
    return [(tokenizer.pieces([token])[0], logprob) for token, logprob in found]


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}
