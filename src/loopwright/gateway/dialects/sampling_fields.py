"""The fields of a request that say how its tokens are sampled, as OpenAI, vLLM, llama.cpp and SGLang name them."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import orjson
from pydantic import ValidationError

from loopwright.engines.base import Guide, Sampling
from loopwright.gateway.dialects.fields import BadRequest, short_repr, text, to_json

_NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
"""The numbers of `Sampling` that every dialect has under the same name."""
_NONE = {"repetition_penalty": 0, "top_k": -1}
"""What stands for none: 0 as for every other penalty, and what vLLM and SGLang send for all tokens."""
_MAX_BIAS, _MAX_DIGITS = 100, 9
_SET_BY_REQUEST = {"messages": (None, []), "tools": (None, []), "add_generation_prompt": (None, True), "self": ()}
"""Arguments of a chat template that are not the client's, and their values that change nothing."""
_GuideKind = Literal["json", "regex", "choice", "grammar"]
GUIDE_FIELDS: Mapping[str, _GuideKind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "ebnf": "grammar",
}
"""The fields for guided decoding, as vLLM, llama.cpp and SGLang name them."""


def sampling(
    defaults: Sampling, body: Mapping[str, Any], limits: Sequence[str], vocabulary: int, *, top_logprobs: int = 0
) -> Sampling:
    """The session's default sampling, overridden by the request.

    The first of `limits` that it contains is the number of tokens; `vocabulary` is the number of token ids.
    """
    limit = next((name for name in limits if body.get(name) is not None), limits[0])
    names = {**{name: name for name in _NUMBERS}, limit: "max_tokens"}
    values = {ours: body[theirs] for theirs, ours in names.items() if body.get(theirs) is not None}
    for name, none in _NONE.items():
        if name in values and values[name] == none:
            del values[name]
    for theirs, ours in names.items():
        if isinstance(values.get(ours), bool | str | list | dict):  # some of which pydantic would accept as numbers
            raise BadRequest(f"{theirs}: expected a number, got {short_repr(values[ours])}", theirs)
    try:
        result = _override(defaults, tuple(values.items()))
    except ValidationError as error:
        first = error.errors()[0]
        where = {ours: theirs for theirs, ours in names.items()}.get(str(first["loc"][0]), str(first["loc"][0]))
        raise BadRequest(f"{where}: {first['msg']}", where) from error
    more: dict[str, Any] = {"top_logprobs": top_logprobs} if top_logprobs else {}
    if bias := body.get("logit_bias"):
        more["logit_bias"] = _logit_bias(bias, vocabulary)
    if (guide := _guide(body)) is not None:
        more["guide"] = guide
    return result.model_copy(update=more) if more else result


@lru_cache(maxsize=256)
def _override(defaults: Sampling, values: tuple[tuple[str, Any], ...]) -> Sampling:
    """Cached, because the requests of an agent usually set the same values, and validation is slow."""
    return Sampling.model_validate({**defaults.model_dump(), **dict(values), "stop": ()})


def _logit_bias(value: Any, vocabulary: int) -> tuple[tuple[int, float], ...]:
    """Biases by token id, from an object whose keys are ids as text."""
    pairs = []
    for key, bias in (value if isinstance(value, dict) else {"": value}).items():
        if not key.isascii() or not key.isdecimal() or len(key) > _MAX_DIGITS or int(key) >= vocabulary:
            raise BadRequest(
                f"logit_bias: {key!r:.60} is not a token of this model, which has {vocabulary}", "logit_bias"
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float) or abs(bias) > _MAX_BIAS:
            raise BadRequest(f"logit_bias: expected -{_MAX_BIAS} to {_MAX_BIAS}, got {short_repr(bias)}", "logit_bias")
        if bias:
            pairs.append((int(key), float(bias)))
    return tuple(sorted(pairs))


def _guide(body: Mapping[str, Any]) -> Guide | None:
    """What the request says that the turn must match, if anything."""
    guides = [_guide_of(kind, body[name], name) for name, kind in GUIDE_FIELDS.items() if body.get(name)]
    outputs = body.get("structured_outputs") or {}
    if not isinstance(outputs, dict):
        raise BadRequest("structured_outputs: expected an object", "structured_outputs")
    for name, value in outputs.items():
        if value and name not in ("json", "regex", "choice", "grammar"):
            raise BadRequest(f"structured_outputs.{name}: not supported", f"structured_outputs.{name}")
        if value:
            guides.append(_guide_of(name, value, f"structured_outputs.{name}"))
    if len(guides) > 1:
        names = ", ".join(guide.source for guide in guides)
        raise BadRequest(f"{guides[1].source}: a turn can match one of these only: {names}", guides[1].source)
    return guides[0] if guides else None


def _guide_of(kind: _GuideKind, value: Any, source: str) -> Guide:
    if kind in ("regex", "grammar"):
        return Guide(kind=kind, value=text(value, source), source=source)
    if kind == "choice":
        choices = [text(choice, source) for choice in (value if isinstance(value, list) else [None])]
        return Guide(kind=kind, value=orjson.dumps(choices).decode(), source=source)
    if isinstance(value, str):  # the schema as JSON
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"{source}: the schema is not valid JSON: {error}", source) from error
    return Guide(kind=kind, value=to_json(value, source), source=source)


def template_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for the chat template."""
    value = body.get("chat_template_kwargs") or {}
    to_json(value, "chat_template_kwargs")
    for name, neutral in _SET_BY_REQUEST.items():
        if name in value and value[name] not in neutral:
            where = f"chat_template_kwargs.{name}"
            raise BadRequest(f"{where}: not supported: the rest of the request sets it", where)
    return {name: argument for name, argument in value.items() if name not in _SET_BY_REQUEST}
