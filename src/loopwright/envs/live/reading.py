"""Reading samples: what came over the wire becomes what the space's `sample()` would give, and can be checked."""

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from loopwright.envs.live.answer import shown
from loopwright.envs.live.wire import WireError, decode_array

Reader = Callable[[Any, str], Any]
"""Decodes a value from the wire to what the space's `sample()` would return. The second argument names the field."""
Checker = Callable[[Any], str | None]
"""Says in words what is wrong with a sample, the field's name first; None if it is good."""

_FEW = 64


def reader(space: "Space[Any]") -> Reader:
    """What reads samples of this space. Made once per space, so that a step pays for no decisions."""
    match space:
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            return _array_reader(space)
        case spaces.Discrete():
            return _discrete_reader(np.dtype(space.dtype))
        case spaces.Dict():
            return _dict_reader({key: reader(part) for key, part in space.spaces.items()})
        case spaces.Tuple():
            return _tuple_reader([reader(part) for part in space.spaces])
    return _text


def _array_reader(space: "Space[Any]") -> Reader:
    dtype, shape = np.dtype(space.dtype), space.shape or ()
    name, sizes, size_bytes = dtype.name, list(shape), math.prod(shape) * dtype.itemsize
    little = dtype.newbyteorder("<")
    plain = dtype.kind != "b" and dtype == little

    def read(value: Any, field: str) -> Any:
        if type(value) is not dict:
            return _from_numbers(value, dtype, field)
        data = value.get("data")
        as_declared = plain and value.get("nd") == name and value.get("shape") == sizes
        if as_declared and type(data) is bytes and len(data) == size_bytes:
            # The copy owns its memory and can be written to, as that of any other environment.
            return np.ndarray(shape, dtype, data).copy()
        return decode_array(value, field)

    return read


def _from_numbers(value: Any, dtype: np.dtype[Any], field: str) -> Any:
    """An array of the declared type from a number or from lists of numbers."""
    try:
        found = np.asarray(value)
        allowed = "iub" if dtype.kind in "iub" else "iubf"
        if found.dtype.kind not in allowed and found.size:
            raise WireError(f"{field}: {shown(value)} where numbers of {dtype.name} are declared")
        with np.errstate(over="ignore"):
            return np.array(value, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"{field}: {shown(value)} where numbers of {dtype.name} are declared: {error}") from error


def _discrete_reader(dtype: np.dtype[Any]) -> Reader:
    make = dtype.type

    def read(value: Any, field: str) -> Any:
        if type(value) is dict:
            value = decode_array(value, field)[()]
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise WireError(f"{field}: {shown(value)} where an integer is declared")
        try:
            return make(value)
        except OverflowError as error:
            raise WireError(f"{field}: {error}") from error

    return read


def _dict_reader(parts: dict[str, Reader]) -> Reader:
    def read(value: Any, field: str) -> Any:
        if type(value) is not dict or value.keys() != parts.keys():
            found = f"the keys {sorted(map(str, value))}" if type(value) is dict else shown(value)
            raise WireError(f"{field}: {found} where the keys {sorted(parts)} are declared")
        return {key: part(value[key], f"{field}[{key!r}]") for key, part in parts.items()}

    return read


def _tuple_reader(parts: list[Reader]) -> Reader:
    def read(value: Any, field: str) -> Any:
        if type(value) is not list or len(value) != len(parts):
            raise WireError(f"{field}: {shown(value)} where a list of {len(parts)} is declared")
        return tuple(part(item, f"{field}[{n}]") for n, (part, item) in enumerate(zip(parts, value, strict=True)))

    return read


def _text(value: Any, field: str) -> Any:
    if type(value) is not str:
        raise WireError(f"{field}: {shown(value)} where text is declared")
    return value


def checker(space: "Space[Any]", field: str = "obs") -> Checker:
    """What checks samples of this space: kind, shape, dtype, and that every number is one.

    The bounds of a Box are not checked: environments overstep them now and then (CartPole's velocities have none),
    and no algorithm depends on them. Those of discrete spaces are, for they become indices.
    """
    match space:
        case spaces.Box():
            return _box_checker(np.dtype(space.dtype), space.shape, field)
        case spaces.Dict():
            return _dict_checker({key: checker(part, f"{field}[{key!r}]") for key, part in space.spaces.items()}, field)
        case spaces.Tuple():
            return _tuple_checker([checker(part, f"{field}[{n}]") for n, part in enumerate(space.spaces)], field)
    return lambda value: None if space.contains(value) else f"{field}: {shown(value)} does not lie in {space}"


def keeper(space: "Space[Any]") -> Callable[[Any], Any]:
    """What keeps a sample as it is now, whatever its owner does with it later."""
    return (lambda value: value) if holds_number(space) else deepcopy


def holds_array(space: "Space[Any]") -> bool:
    """Whether a sample is one array."""
    return isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary)


def holds_number(space: "Space[Any]") -> bool:
    """Whether a sample cannot change: a number or a text."""
    return isinstance(space, spaces.Discrete | spaces.Text)


def _box_checker(dtype: np.dtype[Any], shape: tuple[int, ...], field: str) -> Checker:
    floating, few = dtype.kind == "f", math.prod(shape) <= _FEW

    def check(value: Any) -> str | None:
        # Of a Box without dimensions a sample may be a bare number of numpy's.
        if not isinstance(value, np.ndarray | np.generic):
            return f"{field}: {shown(value)} where an array of {dtype.name} is declared"
        if value.dtype != dtype:
            return f"{field}: numbers of {value.dtype.name} where {dtype.name} is declared"
        if value.shape != shape:
            return f"{field}: shape {value.shape} where {shape} is declared"
        if floating:
            # Going over a few numbers one by one is three times as fast as starting up numpy's machinery.
            finite = all(map(math.isfinite, value.ravel().tolist())) if few else bool(np.isfinite(value).all())
            if not finite:
                return f"{field}: {_unbounded(np.asarray(value))}"
        return None

    return check


def _unbounded(value: np.ndarray[Any, Any]) -> str:
    place = np.argwhere(~np.isfinite(value))[0]
    return f"element {place.tolist()} is {value[tuple(place)]}"


def _dict_checker(parts: dict[str, Checker], field: str) -> Checker:
    def check(value: Any) -> str | None:
        if not isinstance(value, dict) or value.keys() != parts.keys():
            return f"{field}: {shown(value)} where the keys {sorted(parts)} are declared"
        return next((wrong for key, part in parts.items() if (wrong := part(value[key]))), None)

    return check


def _tuple_checker(parts: list[Checker], field: str) -> Checker:
    def check(value: Any) -> str | None:
        if not isinstance(value, tuple) or len(value) != len(parts):
            return f"{field}: {shown(value)} where a tuple of {len(parts)} is declared"
        return next((wrong for part, item in zip(parts, value, strict=True) if (wrong := part(item))), None)

    return check
