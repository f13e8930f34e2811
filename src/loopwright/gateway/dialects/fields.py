"""Fields of a request and of an answer: each is checked as it is read, so that a refusal names the one to blame."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import orjson
from pydantic import ValidationError

from loopwright.core.task import Message
from loopwright.engines.base import Sampling
from loopwright.gateway.dialects.base import BadRequest
from loopwright.gateway.sessions.template import Tool

_LONGEST = 60


def text(value: Any, where: str) -> str:
    """A text, or the blame on the field."""
    if not isinstance(value, str):
        raise BadRequest(f"{where}: expected a text, got {_shown(value)}", where)
    return value


def name(value: Any, where: str) -> str:
    """A text that is not empty."""
    if not text(value, where):
        raise BadRequest(f"{where}: must not be empty", where)
    return str(value)


def objects(value: Any, where: str) -> list[Mapping[str, Any]]:
    """A list of objects; nothing is an empty one."""
    found = [] if value is None else value
    if not isinstance(found, list):
        raise BadRequest(f"{where}: expected a list, got {_shown(value)}", where)
    if set(map(type, found)) - {dict}:
        index, item = next((index, item) for index, item in enumerate(found) if not isinstance(item, dict))
        raise BadRequest(f"{where}.{index}: expected an object, got {_shown(item)}", f"{where}.{index}")
    return found


def flag(body: Mapping[str, Any], where: str) -> bool:
    """True or false; nothing is false."""
    value = body.get(where)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{where}: expected true or false, got {_shown(value)}", where)
    return bool(value)


def model(body: Mapping[str, Any]) -> str:
    """The model's name, which may be any: a session has one engine."""
    return text(body.get("model") or "", "model")


def sampling(defaults: Sampling, body: Mapping[str, Any], fields: Mapping[str, str]) -> Sampling:
    """The session's own sampling under what the request says; `fields` are its names for ours."""
    said = {ours: body[theirs] for theirs, ours in fields.items() if body.get(theirs) is not None}
    for theirs, ours in fields.items():
        if isinstance(said.get(ours), bool | str):  # which pydantic would take for numbers
            raise BadRequest(f"{theirs}: expected a number, got {_shown(said[ours])}", theirs)
    try:
        return _laid(defaults, tuple(said.items()))
    except TypeError as error:  # a list or an object
        wrong = next(theirs for theirs, ours in fields.items() if isinstance(said.get(ours), list | dict))
        raise BadRequest(f"{wrong}: expected a number, got {_shown(body[wrong])}", wrong) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = {ours: theirs for theirs, ours in fields.items()}.get(str(first["loc"][0]), str(first["loc"][0]))
        raise BadRequest(f"{where}: {first['msg']}", where) from error


@lru_cache(maxsize=256)
def _laid(defaults: Sampling, said: tuple[tuple[str, Any], ...]) -> Sampling:
    """One value for all requests that say the same, as those of an agent do: checking it costs more than finding it."""
    return Sampling.model_validate({**defaults.model_dump(), **dict(said), "stop": ()})


def function(called: Any, described: Any, parameters: Any, where: str) -> Tool:
    """A tool as OpenAI's chat format describes it."""
    tool: dict[str, Any] = {"name": name(called, f"{where}.name")}
    if described is not None:
        tool["description"] = text(described, f"{where}.description")
    tool["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    written(tool["parameters"], f"{where}.parameters")
    return {"type": "function", "function": tool}


def call(id: Any, called: Any, arguments: str, where: str) -> Message:
    """A tool call as OpenAI's chat format writes it."""
    made = {"name": name(called, f"{where}.name"), "arguments": arguments}
    return {"id": text(id, f"{where}.id"), "type": "function", "function": made}


def written(value: Any, where: str) -> str:
    """An object as JSON; one that is nested beyond what can be read back is refused."""
    if not isinstance(value, dict):
        raise BadRequest(f"{where}: expected an object, got {_shown(value)}", where)
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        if "ecursion" in str(error):
            raise BadRequest(f"{where}: nested too deeply", where) from error
    return json.dumps(value, ensure_ascii=False)  # which knows integers of more than 64 bits


def refusal(kind: str, where: str) -> BadRequest:
    """What is told about content that is no text."""
    noun = "images are" if "image" in kind else f"{kind!r} is"
    return BadRequest(f"{where}: {noun} not supported: only text can be shown to this model", where)


def event(kind: str, data: Mapping[str, Any]) -> bytes:
    """A server-sent event with its name."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(data))


def joined(texts: Sequence[str]) -> str:
    """Blocks of text that somebody wrote apart, as one text."""
    return "\n\n".join(texts)


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"
