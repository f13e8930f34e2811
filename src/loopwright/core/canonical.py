"""Canonical values: 5, 5.0 and numpy's 5 are one value, so that equal actions get equal keys."""

import math
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import orjson

from loopwright.core.errors import InvalidAction

_EXACT = 2**53
"""Beyond this, floats cannot represent every integer."""


def canonical(value: Any) -> Any:
    """The one JSON value for `value`, or InvalidAction if JSON cannot hold it."""
    kind = type(value)
    # The types that actions are made of, first: this runs several times per trial.
    if kind is float:
        if value.is_integer() and abs(value) <= _EXACT:
            return int(value)
        if math.isfinite(value):
            return value
    elif kind is str and value.isascii():
        return value
    elif kind is dict:
        return {canonical(str(name)): canonical(value[name]) for name in sorted(value, key=str)}
    elif kind is tuple:
        return [canonical(item) for item in value]
    match value:
        case bool() | None:
            return value
        case str():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise InvalidAction(f"{value!r} is not valid Unicode") from error
            # Not `value` itself: numpy's strings and enumerations are subclasses of str.
            return str.__str__(value)
        case int():
            if not -(2**63) <= value < 2**63:
                raise InvalidAction(f"{value!r} does not fit into 64 bits")
            return int(value)
        case float():
            if not math.isfinite(value):
                raise InvalidAction(f"{value!r} is not a finite number")
            return int(value) if value.is_integer() and abs(value) <= _EXACT else float(value)
        case Mapping():
            return {canonical(str(name)): canonical(value[name]) for name in sorted(value, key=str)}
        case list() | tuple():
            return [canonical(item) for item in value]
        case _ if hasattr(value, "tolist"):  # numpy's scalars and arrays, without importing numpy
            return canonical(value.tolist())
    raise InvalidAction(f"{value!r} of type {type(value).__name__} is not a number, string, boolean, list or table")


def key_of(*parts: Any) -> str:
    """A 128-bit key for canonical values, equal whenever they are equal."""
    return blake2b(orjson.dumps(canonical(parts)), digest_size=16).hexdigest()
