"""The live protocol's bytes: frames, arrays and spaces, without sockets. docs/live-protocol.md is the same in prose."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from loopwright.core.errors import LoopwrightError, MissingExtra

try:
    import msgpack  # type: ignore[import-untyped]
    from gymnasium import Space, spaces
except ImportError as missing:
    raise MissingExtra("an environment behind a socket", "rl") from missing

VERSION = 1
HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 * 2**20
_DEEPEST = 32

Message = dict[str, Any]
Reader = Callable[[Any, str], Any]
"""Makes of a value as it arrived, and of the field's name for complaints, what the space's `sample()` would give."""

_DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        "bool",
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}
# By numpy's own short code, which costs a tenth of a look at `dtype.name`.
_NAMES = {dtype.str: name for name, dtype in _DTYPES.items()}


class WireError(LoopwrightError, ValueError):
    """Bytes, or values in them, that the protocol does not allow."""


class Unsendable(WireError):
    """A message that has no form on the wire; nothing was sent."""


class Framer:
    """Makes frames, for one thread at a time."""

    def __init__(self) -> None:
        self._packer = msgpack.Packer(default=_packable)

    def frame(self, message: Message) -> bytes:
        """The message as it is sent; Unsendable if something in it cannot be."""
        try:
            body: bytes = self._packer.pack(message)
        except (TypeError, ValueError, OverflowError) as error:
            self._packer.reset()
            raise Unsendable(str(error)) from error
        if len(body) > MAX_FRAME_BYTES:
            raise Unsendable(f"it takes a frame of {len(body):,} bytes; {MAX_FRAME_BYTES:,} are allowed")
        return len(body).to_bytes(HEADER_BYTES, "big") + body


def frame(message: Message) -> bytes:
    """One message as it is sent."""
    return Framer().frame(message)


def body_bytes(header: bytes | bytearray) -> int:
    """How many bytes follow a header; a WireError if nobody who speaks this protocol would send so many."""
    size = int.from_bytes(header[:HEADER_BYTES], "big")
    if size > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {size:,} bytes is announced; {MAX_FRAME_BYTES:,} are allowed")
    return size


def unpack(body: bytes | memoryview) -> Message:
    """The message in a frame's body."""
    try:
        message = msgpack.unpackb(body, strict_map_key=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(f"a frame that is no MessagePack: {type(error).__name__}: {error}") from error
    if type(message) is not dict or type(message.get("type")) is not str:
        raise WireError("a frame that is no map with a 'type'")
    return message


def _packable(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        name = _NAMES.get(value.dtype.str)
        if name is None:
            if value.dtype.name not in _DTYPES:
                raise TypeError(f"an array of {value.dtype} cannot be sent")
            name, value = value.dtype.name, value.astype(_DTYPES[value.dtype.name])
        return {"nd": name, "shape": value.shape, "data": value.tobytes()}
    # Numbers travel as numbers, whatever their width: the space says what they were.
    if isinstance(value, np.bool_ | np.integer | np.float16 | np.float32):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{_kind(value)} cannot be sent")


def described(value: Any, depth: int = 0) -> Any:
    """The value with everything that cannot be sent replaced by its text: for info, which may hold anything."""
    if value is None or isinstance(value, bool | str | bytes | float | np.bool_ | np.integer | np.floating):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, np.ndarray) and value.dtype.name in _DTYPES:
        return value
    if depth < _DEEPEST and isinstance(value, Mapping):
        return {str(key): described(item, depth + 1) for key, item in value.items()}
    if depth < _DEEPEST and isinstance(value, list | tuple):
        return [described(item, depth + 1) for item in value]
    return repr(value)


def revived(value: Any, field: str, depth: int = 0) -> Any:
    """The value with its arrays made arrays again."""
    if depth > _DEEPEST:
        raise WireError(f"{field}: nested more than {_DEEPEST} deep")
    if type(value) is dict:
        if _is_array(value):
            return array_from(value, field)
        return {key: revived(item, field, depth + 1) for key, item in value.items()}
    return [revived(item, field, depth + 1) for item in value] if type(value) is list else value


def _is_array(value: Mapping[Any, Any]) -> bool:
    return len(value) == 3 and "nd" in value and "shape" in value and "data" in value


def array_from(value: Mapping[Any, Any], field: str) -> np.ndarray[Any, Any]:
    """The array that a map of nd, shape and data stands for."""
    if not _is_array(value):
        raise WireError(f"{field}: a map that is no array; an array has nd, shape and data")
    dtype, shape, data = _DTYPES.get(str(value["nd"])), value["shape"], value["data"]
    if dtype is None:
        raise WireError(f"{field}: an array of {value['nd']!r}. Known: {', '.join(_DTYPES)}.")
    if type(shape) is not list or not all(type(size) is int and size >= 0 for size in shape):
        raise WireError(f"{field}: a shape of {shape!r}; it takes a list of numbers from 0 up")
    if type(data) is not bytes or len(data) != math.prod(shape) * dtype.itemsize:
        raise WireError(
            f"{field}: {value['nd']} of shape {shape} needs {math.prod(shape) * dtype.itemsize} bytes of data"
        )
    if dtype.kind == "b":
        # Any byte but 0 is true; numpy's own view of them would make bools that equal neither.
        return np.frombuffer(data, np.uint8).reshape(shape).astype(np.bool_)
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="))


# Spaces


def describe(space: "Space[Any]") -> Message:
    """A space as a map."""
    match space:
        case spaces.Box():
            low = _bound(space.low, -math.inf, space.bounded_below)
            high = _bound(space.high, math.inf, space.bounded_above)
            return {"type": "Box", "shape": list(space.shape), "dtype": _name(space), "low": low, "high": high}
        case spaces.Discrete():
            return {"type": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": _name(space)}
        case spaces.MultiDiscrete():
            nvec, start = space.nvec.tolist(), space.start.tolist()
            return {"type": "MultiDiscrete", "nvec": nvec, "start": start, "dtype": _name(space)}
        case spaces.MultiBinary():
            return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.n)}
        case spaces.Dict():
            if wrong := [key for key in space.spaces if not isinstance(key, str)]:
                raise WireError(f"a Dict space with the key {wrong[0]!r}: keys are text")
            return {"type": "Dict", "spaces": {key: describe(part) for key, part in space.spaces.items()}}
        case spaces.Tuple():
            return {"type": "Tuple", "spaces": [describe(part) for part in space.spaces]}
        case spaces.Text():
            lengths = {"min_length": space.min_length, "max_length": space.max_length}
            return {"type": "Text", **lengths, "charset": "".join(space.character_list)}
    raise WireError(f"a space of the kind {type(space).__name__} cannot be sent. Known: {', '.join(_SPACES)}.")


def _name(space: "Space[Any]") -> str:
    dtype = np.dtype(space.dtype)
    if dtype.name not in _DTYPES:
        raise WireError(f"a space of {dtype.name} cannot be sent. Known: {', '.join(_DTYPES)}.")
    return dtype.name


def _bound(values: np.ndarray[Any, Any], unbounded: float, bounded: np.ndarray[Any, Any]) -> Any:
    """One number where all are alike (images have many), an exact array otherwise."""
    if not bounded.any():
        return unbounded
    alike = values.size > 0 and bool((values == values.flat[0]).all()) and bool(bounded.all())
    return values.flat[0].item() if alike else values


def space_from(value: Any, field: str) -> "Space[Any]":
    """The space that a map describes; a WireError names what is wrong with it."""
    kind = value.get("type") if isinstance(value, dict) else None
    if type(kind) is not str or kind not in _SPACES:
        raise WireError(f"{field}: a space of the type {kind!r}. Known: {', '.join(_SPACES)}.")
    try:
        return _SPACES[kind](value, field)
    except KeyError as error:
        raise WireError(f"{field}: a {kind} without {error}") from None
    except WireError:
        raise
    except (AttributeError, TypeError, ValueError, AssertionError, OverflowError, RecursionError, MemoryError) as error:
        raise WireError(f"{field}: no {kind} can be made of it: {error}") from error


def _box(value: Message, field: str) -> "Space[Any]":
    shape, dtype = value["shape"], value["dtype"]
    if dtype not in _DTYPES:
        raise WireError(f"{field}: a Box of {dtype!r}. Known: {', '.join(_DTYPES)}.")
    if type(shape) is not list or not all(type(size) is int and size >= 0 for size in shape):
        raise WireError(f"{field}: a shape of {shape!r}; it takes a list of numbers from 0 up")
    _small_enough(shape, field)
    return spaces.Box(_limits(value["low"], dtype), _limits(value["high"], dtype), tuple(shape), np.dtype(dtype).type)


def _limits(value: Any, dtype: str) -> Any:
    if isinstance(value, dict):
        return array_from(value, "low or high")
    return np.array(value, np.dtype(dtype)) if isinstance(value, list) else value


def _multi_binary(value: Message, field: str) -> "Space[Any]":
    _small_enough(value["n"] if isinstance(value["n"], list) else [value["n"]], field)
    return spaces.MultiBinary(value["n"])


def _small_enough(shape: list[int], field: str) -> None:
    # A space of which no sample fits a frame would only serve to fill the other side's memory.
    if math.prod(shape) > MAX_FRAME_BYTES:
        raise WireError(f"{field}: {math.prod(shape):,} elements do not fit a frame of {MAX_FRAME_BYTES:,} bytes")


_SPACES: dict[str, Callable[[Message, str], "Space[Any]"]] = {
    "Box": _box,
    "Discrete": lambda v, _: spaces.Discrete(v["n"], start=v.get("start", 0), dtype=v.get("dtype", "int64")),
    "MultiDiscrete": lambda v, _: spaces.MultiDiscrete(v["nvec"], v.get("dtype", "int64"), start=v.get("start")),
    "MultiBinary": _multi_binary,
    # As pairs, for gymnasium sorts a plain dict, and flattening depends on the order.
    "Dict": lambda v, f: spaces.Dict([(key, space_from(part, f"{f}[{key!r}]")) for key, part in v["spaces"].items()]),
    "Tuple": lambda v, f: spaces.Tuple([space_from(part, f"{f}[{n}]") for n, part in enumerate(v["spaces"])]),
    "Text": lambda v, _: spaces.Text(v["max_length"], min_length=v.get("min_length", 1), charset=v["charset"]),
}


def _kind(value: Any) -> str:
    return f"a value of the type {type(value).__name__}"
