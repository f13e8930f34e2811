"""Options of a library's algorithm: their values, checked against the types that the library declares."""

import json
from typing import Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

_WORDS = {float: "a number", int: "a whole number", bool: "true or false", str: "text", dict: "a table", list: "a list"}


def read_option(annotation: Any, default: Any, value: Any) -> Any:
    """The value as the library takes it: a list becomes a tuple where it wants one. Raises ValueError.

    A value of the default's type is accepted as well, since some annotations of the libraries are too narrow.
    """
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
        # As JSON, in which a list may be a tuple, but neither text nor true is a number.
        return adapter.validate_json(json.dumps(value), strict=True)
    except (PydanticUserError, NameError, TypeError):
        return value  # a type that cannot be checked, or a Python object
    except ValidationError:
        if type(value) is type(default):
            return value
        choices = list(dict.fromkeys(word for kind in _kinds(annotation) if (word := _WORDS.get(kind))))
        reason = f"must be {' or '.join(choices)}, not {value!r}" if choices else f"cannot be {value!r}"
        default_text = f"; the default is {json.dumps(default)}" if isinstance(default, int | float | str) else ""
        raise ValueError(f"{reason}{default_text}.") from None


def _kinds(annotation: Any) -> list[Any]:
    """The types that an annotation allows: those of a union, without their arguments."""
    parts = get_args(annotation)
    origin = getattr(annotation, "__origin__", annotation)
    if origin in (list, tuple):
        return [list]
    if origin in _WORDS or not parts:
        return [origin]
    return [kind for part in parts for kind in _kinds(part)]
