"""The base of all configuration: strict, frozen, explained under each field."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from loopwright.core.errors import did_you_mean


class Config(BaseModel):
    """A typo is an error, a value never changes, and the docstring under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def explain(error: ValidationError, model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """(key, message) of each thing that is wrong, in words for the person who wrote the file."""
    for detail in error.errors():
        place = [str(part) for part in detail["loc"] if not _is_tag(part)]
        match detail["type"]:
            case "extra_forbidden":
                known = _keys(model, place[:-1])
                yield ".".join(place[:-1]), f"unknown key {place[-1]!r}. {did_you_mean(place[-1], known)}"
            case "missing":
                yield ".".join(place), "is missing"
            case _:
                message = detail["msg"].removeprefix("Value error, ")
                given = detail["input"]
                shown = "" if isinstance(given, (dict, list)) or detail["type"] == "value_error" else f", not {given!r}"
                yield ".".join(place), f"{message[0].lower()}{message[1:]}{shown}"


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
