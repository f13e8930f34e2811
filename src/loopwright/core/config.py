"""The base of all configuration: strict, frozen, explained under each field."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from loopwright.core.errors import did_you_mean

_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


FUNCTION = r"^[\w.]+:[\w.]+$"
"""The pattern of `module:function`."""


class Explained(ValueError):
    """Everything that is wrong within one field, so that each thing is told at its own place."""

    def __init__(self, found: Iterable[tuple[str, str]]) -> None:
        self.found = tuple(found)
        super().__init__("; ".join(f"{key}: {message}" if key else message for key, message in self.found))


def size_bytes(text: Any) -> Any:
    """`"2GiB"` as a number of bytes; anything else is left to the type's own check."""
    if not isinstance(text, str):
        return text
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is no size; write for example '512MiB' or '2GiB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])


class Config(BaseModel):
    """A typo is an error, a value never changes, and the docstring under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def explain(error: ValidationError, model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """(key, message) of each thing that is wrong, in words for the person who wrote the file."""
    for detail in error.errors():
        place = [part for part in detail["loc"] if not _is_tag(part)]
        where, facts, given = _joined(place), detail.get("ctx", {}), detail["input"]
        match detail["type"]:
            case "extra_forbidden":
                key = str(place[-1])
                known = _keys(model, [str(part) for part in place[:-1]])
                yield _joined(place[:-1]), f"unknown key {key!r}. {did_you_mean(key, known)}"
            case "missing":
                yield where, f"is missing{_example(model, place)}"
            case "value_error" if isinstance(facts.get("error"), Explained):
                for key, message in facts["error"].found:
                    yield (f"{where}.{key}" if where and key else where or key), message
            case "too_short":
                yield where, f"must have at least {facts['min_length']} of them, not {facts['actual_length']}"
            case "string_pattern_mismatch" if facts["pattern"] == FUNCTION:
                yield where, f"write it as module:function, not {given!r}"
            case "model_type":
                yield where, f"must be a table, not {given!r}"
            case kind:
                message = detail["msg"].removeprefix("Value error, ")
                shown = "" if isinstance(given, (dict, list)) or kind == "value_error" else f", not {given!r}"
                yield where, f"{message[0].lower()}{message[1:]}{shown}"


def _joined(place: Sequence[Any]) -> str:
    """A place as people write it: `parts[1].weight`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


def _example(model: type[BaseModel], place: Sequence[Any]) -> str:
    field = model.model_fields.get(str(place[0])) if len(place) == 1 else None
    return f"; for example {place[0]} = {field.examples[0]}" if field is not None and field.examples else ""


def _is_tag(part: Any) -> bool:
    """Whether pydantic, not the user, put this into a location (the branch of a union that was tried)."""
    return isinstance(part, str) and (
        part.startswith(("tuple[", "literal[", "constrained-")) or part in {"str", "function-"}
    )


def _keys(model: type[BaseModel], place: list[str]) -> list[str]:
    """The keys that are known at a place inside a model, as far as its annotations tell."""
    for name in place:
        field = model.model_fields.get(name)
        inner = field.annotation if field is not None else None
        candidates = [inner, *getattr(inner, "__args__", ())]
        found = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        if found is not None:
            model = found
        elif field is None:
            continue  # a name of the user's, such as a metric's
    return [field.alias or name for name, field in model.model_fields.items()]
