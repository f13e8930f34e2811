"""Samples of a space: decode them from the wire, check them, copy them. One function per space, chosen once."""

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from loopwright.envs.live.server import short_repr
from loopwright.envs.live.wire import WireError, decode_array

Reader = Callable[[Any, str], Any]
"""Decodes a value from the wire to what the space's `sample()` would return. The second argument names the field."""
Checker = Callable[[Any], str | None]
"""What is wrong with a sample, the field's name first; None if nothing is."""

_FEW = 64


def reader(space: "Space[Any]") -> Reader:
    """The function that decodes samples of this space."""
    match space:
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            return _array_reader(space)
        case spaces.Discrete():
            return _discrete_reader(np.dtype(space.dtype))
        case spaces.Dict():
            return _dict_reader({key: reader(part) for key, part in space.spaces.items()})
        case spaces.Tuple():
            return _tuple_reader([reader(part) for part in space.spaces])
    return _read_text


def _array_reader(space: "Space[Any]") -> Reader:
    dtype, shape = np.dtype(space.dtype), space.shape or ()
    name, sizes, size_bytes = dtype.name, list(shape), math.prod(shape) * dtype.itemsize
    native = dtype.kind != "b" and dtype == dtype.newbyteorder("<")

    def read(value: Any, field: str) -> Any:
        if type(value) is not dict:
            return _array_from_lists(value, dtype, field)
        data = value.get("data")
        as_declared = native and value.get("nd") == name and value.get("shape") == sizes
        if as_declared and type(data) is bytes and len(data) == size_bytes:
            # A copy owns its memory and is writable, as an environment's observations usually are.
            return np.ndarray(shape, dtype, data).copy()
        return decode_array(value, field)

    return read


def _array_from_lists(value: Any, dtype: np.dtype[Any], field: str) -> Any:
    """An array of the declared type from a number or nested lists of numbers."""
    problem = f"{field}: expected numbers of {dtype.name}, got {short_repr(value)}"
    try:
        numbers = np.asarray(value)
        allowed = "iub" if dtype.kind in "iub" else "iubf"
        if numbers.dtype.kind not in allowed and numbers.size:
            raise WireError(problem)
        with np.errstate(over="ignore"):
            return np.array(value, dtype)
    except WireError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{problem}: {error}") from error


def _discrete_reader(dtype: np.dtype[Any]) -> Reader:
    make = dtype.type

    def read(value: Any, field: str) -> Any:
        if type(value) is dict:
            value = decode_array(value, field)[()]
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise WireError(f"{field}: expected an integer, got {short_repr(value)}")
        try:
            return make(value)
        except OverflowError as error:
            raise WireError(f"{field}: {error}") from error

    return read


def _dict_reader(parts: dict[str, Reader]) -> Reader:
    def read(value: Any, field: str) -> Any:
        if type(value) is not dict or value.keys() != parts.keys():
            actual = f"the keys {sorted(map(str, value))}" if type(value) is dict else short_repr(value)
            raise WireError(f"{field}: expected the keys {sorted(parts)}, got {actual}")
        return {key: part(value[key], f"{field}[{key!r}]") for key, part in parts.items()}

    return read


def _tuple_reader(parts: list[Reader]) -> Reader:
    def read(value: Any, field: str) -> Any:
        if type(value) is not list or len(value) != len(parts):
            raise WireError(f"{field}: expected a list of {len(parts)}, got {short_repr(value)}")
        return tuple(part(item, f"{field}[{n}]") for n, (part, item) in enumerate(zip(parts, value, strict=True)))

    return read


def _read_text(value: Any, field: str) -> Any:
    if type(value) is not str:
        raise WireError(f"{field}: expected text, got {short_repr(value)}")
    return value


def checker(space: "Space[Any]", field: str = "obs") -> Checker:
    """The function that checks samples of this space: type, shape, dtype, and that every number is finite.

    The bounds of a Box are not checked: environments exceed them now and then (CartPole's velocities have none), and no
    algorithm depends on them. Those of discrete spaces are checked, since their samples become indices.
    """
    match space:
        case spaces.Box():
            return _box_checker(np.dtype(space.dtype), space.shape, field)
        case spaces.Dict():
            return _dict_checker({key: checker(part, f"{field}[{key!r}]") for key, part in space.spaces.items()}, field)
        case spaces.Tuple():
            return _tuple_checker([checker(part, f"{field}[{n}]") for n, part in enumerate(space.spaces)], field)
    return lambda value: None if space.contains(value) else f"{field}: {short_repr(value)} is not in {space}"


def _box_checker(dtype: np.dtype[Any], shape: tuple[int, ...], field: str) -> Checker:
    floating, few = dtype.kind == "f", math.prod(shape) <= _FEW

    def check(value: Any) -> str | None:
        # A sample of a Box without dimensions may be a numpy scalar.
        if not isinstance(value, np.ndarray | np.generic):
            return f"{field}: expected an array of {dtype.name}, got {short_repr(value)}"
        if value.dtype != dtype:
            return f"{field}: expected numbers of {dtype.name}, got {value.dtype.name}"
        if value.shape != shape:
            return f"{field}: expected shape {shape}, got {value.shape}"
        if floating:
            # A Python loop over few numbers is three times as fast as a call of numpy.
            finite = all(map(math.isfinite, value.ravel().tolist())) if few else bool(np.isfinite(value).all())
            if not finite:
                array = np.asarray(value)
                index = np.argwhere(~np.isfinite(array))[0]
                return f"{field}: element {index.tolist()} is {array[tuple(index)]}"
        return None

    return check


def _dict_checker(parts: dict[str, Checker], field: str) -> Checker:
    def check(value: Any) -> str | None:
        if not isinstance(value, dict) or value.keys() != parts.keys():
            return f"{field}: expected the keys {sorted(parts)}, got {short_repr(value)}"
        return next((problem for key, part in parts.items() if (problem := part(value[key]))), None)

    return check


def _tuple_checker(parts: list[Checker], field: str) -> Checker:
    def check(value: Any) -> str | None:
        if not isinstance(value, tuple) or len(value) != len(parts):
            return f"{field}: expected a tuple of {len(parts)}, got {short_repr(value)}"
        return next((problem for part, item in zip(parts, value, strict=True) if (problem := part(item))), None)

    return check


def copier(space: "Space[Any]") -> Callable[[Any], Any]:
    """The function that copies samples of this space, so that their owner may change them later."""
    return (lambda value: value) if is_immutable(space) else deepcopy


def is_array(space: "Space[Any]") -> bool:
    """Whether a sample is one array."""
    return isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary)


def is_immutable(space: "Space[Any]") -> bool:
    """Whether a sample is a number or text."""
    return isinstance(space, spaces.Discrete | spaces.Text)
