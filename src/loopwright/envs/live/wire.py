"""The wire format of the live protocol: frames, arrays and spaces, without sockets. See docs/live-protocol.md."""

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
_MAX_DEPTH = 32

Message = dict[str, Any]

_DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        "bool",
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}
# By numpy's short code, which is ten times as fast as `dtype.name`.
_NAMES = {dtype.str: name for name, dtype in _DTYPES.items()}


class WireError(LoopwrightError, ValueError):
    """Bytes or values that the protocol does not allow."""


class Unsendable(WireError):
    """A message that cannot be encoded; nothing was sent."""


class Framer:
    """Encodes messages as frames, for one thread at a time."""

    def __init__(self) -> None:
        self._packer = msgpack.Packer(default=_encode_value)

    def frame(self, message: Message) -> bytes:
        """The message as bytes. Raises Unsendable if a value in it cannot be encoded."""
        try:
            body: bytes = self._packer.pack(message)
        except (TypeError, ValueError, OverflowError) as error:
            self._packer.reset()
            raise Unsendable(str(error)) from error
        if len(body) > MAX_FRAME_BYTES:
            raise Unsendable(f"the frame has {len(body):,} bytes; at most {MAX_FRAME_BYTES:,} are allowed")
        return len(body).to_bytes(HEADER_BYTES, "big") + body


def frame(message: Message) -> bytes:
    """One message as bytes."""
    return Framer().frame(message)


def body_bytes(header: bytes | bytearray) -> int:
    """The length of the body that follows a header. Raises WireError if it exceeds the protocol's limit."""
    size = int.from_bytes(header[:HEADER_BYTES], "big")
    if size > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {size:,} bytes; at most {MAX_FRAME_BYTES:,} are allowed")
    return size


def unpack(body: bytes | memoryview) -> Message:
    """The message in the body of a frame."""
    try:
        message = msgpack.unpackb(body, strict_map_key=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(f"a frame is not valid MessagePack: {type(error).__name__}: {error}") from error
    if type(message) is not dict or type(message.get("type")) is not str:
        raise WireError("a frame is not a map with a 'type'")
    return message


def _encode_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        name = _NAMES.get(value.dtype.str)
        if name is None:
            if value.dtype.name not in _DTYPES:
                raise TypeError(f"an array of {value.dtype} cannot be sent")
            name, value = value.dtype.name, value.astype(_DTYPES[value.dtype.name])
        return {"nd": name, "shape": value.shape, "data": value.tobytes()}
    # Numbers are sent as plain numbers of any width: the space declares the type.
    if isinstance(value, np.bool_ | np.integer | np.float16 | np.float32):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent")


def make_sendable(value: Any, depth: int = 0) -> Any:
    """The value with everything that cannot be sent replaced by its repr: for `info`, which may hold anything."""
    if value is None or isinstance(value, bool | str | bytes | float | np.bool_ | np.integer | np.floating):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, np.ndarray) and value.dtype.name in _DTYPES:
        return value
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return {str(key): make_sendable(item, depth + 1) for key, item in value.items()}
    if depth < _MAX_DEPTH and isinstance(value, list | tuple):
        return [make_sendable(item, depth + 1) for item in value]
    return repr(value)


def decode_arrays(value: Any, field: str, depth: int = 0) -> Any:
    """The value with every encoded array in it decoded."""
    if depth > _MAX_DEPTH:
        raise WireError(f"{field}: nested more than {_MAX_DEPTH} levels deep")
    if type(value) is dict:
        if _is_array(value):
            return decode_array(value, field)
        return {key: decode_arrays(item, field, depth + 1) for key, item in value.items()}
    return [decode_arrays(item, field, depth + 1) for item in value] if type(value) is list else value


def _is_array(value: Mapping[Any, Any]) -> bool:
    return len(value) == 3 and "nd" in value and "shape" in value and "data" in value


def decode_array(value: Mapping[Any, Any], field: str) -> np.ndarray[Any, Any]:
    """The array that a map with nd, shape and data encodes."""
    if not _is_array(value):
        raise WireError(f"{field}: expected an array: a map with nd, shape and data")
    dtype, shape, data = _DTYPES.get(str(value["nd"])), value["shape"], value["data"]
    if dtype is None:
        raise WireError(f"{field}: unknown dtype {value['nd']!r}. Known: {', '.join(_DTYPES)}.")
    _check_shape(shape, field)
    if type(data) is not bytes or len(data) != math.prod(shape) * dtype.itemsize:
        raise WireError(
            f"{field}: {value['nd']} of shape {shape} needs {math.prod(shape) * dtype.itemsize} bytes of data"
        )
    if dtype.kind == "b":
        # Every byte but 0 is true. Viewing the bytes as bool would keep values that equal neither True nor False.
        return np.frombuffer(data, np.uint8).reshape(shape).astype(np.bool_)
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="))


# Spaces


def encode_space(space: "Space[Any]") -> Message:
    """The description of a space."""
    match space:
        case spaces.Box():
            low = _bound(space.low, -math.inf, space.bounded_below)
            high = _bound(space.high, math.inf, space.bounded_above)
            return {"type": "Box", "shape": list(space.shape), "dtype": _dtype_name(space), "low": low, "high": high}
        case spaces.Discrete():
            return {"type": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": _dtype_name(space)}
        case spaces.MultiDiscrete():
            nvec, start = space.nvec.tolist(), space.start.tolist()
            return {"type": "MultiDiscrete", "nvec": nvec, "start": start, "dtype": _dtype_name(space)}
        case spaces.MultiBinary():
            return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.n)}
        case spaces.Dict():
            if wrong := [key for key in space.spaces if not isinstance(key, str)]:
                raise WireError(f"a Dict space has the key {wrong[0]!r}; keys must be strings")
            return {"type": "Dict", "spaces": {key: encode_space(part) for key, part in space.spaces.items()}}
        case spaces.Tuple():
            return {"type": "Tuple", "spaces": [encode_space(part) for part in space.spaces]}
        case spaces.Text():
            lengths = {"min_length": space.min_length, "max_length": space.max_length}
            return {"type": "Text", **lengths, "charset": "".join(space.character_list)}
    raise WireError(f"a space of type {type(space).__name__} cannot be sent. Known: {', '.join(_SPACES)}.")


def _dtype_name(space: "Space[Any]") -> str:
    dtype = np.dtype(space.dtype)
    if dtype.name not in _DTYPES:
        raise WireError(f"a space with dtype {dtype.name} cannot be sent. Known: {', '.join(_DTYPES)}.")
    return dtype.name


def _bound(values: np.ndarray[Any, Any], unbounded: float, bounded: np.ndarray[Any, Any]) -> Any:
    """One number if all bounds are equal, as in images; otherwise the array."""
    if not bounded.any():
        return unbounded
    equal = values.size > 0 and bool((values == values.flat[0]).all()) and bool(bounded.all())
    return values.flat[0].item() if equal else values


def decode_space(value: Any, field: str) -> "Space[Any]":
    """The space of a description. A WireError names what is wrong with it."""
    kind = value.get("type") if isinstance(value, dict) else None
    if type(kind) is not str or kind not in _SPACES:
        raise WireError(f"{field}: unknown space type {kind!r}. Known: {', '.join(_SPACES)}.")
    try:
        return _SPACES[kind](value, field)
    except KeyError as error:
        raise WireError(f"{field}: {kind} has no {error}") from None
    except WireError:
        raise
    except (AttributeError, TypeError, ValueError, AssertionError, OverflowError, RecursionError, MemoryError) as error:
        raise WireError(f"{field}: invalid {kind}: {error}") from error


def _box(value: Message, field: str) -> "Space[Any]":
    shape, dtype = value["shape"], value["dtype"]
    if dtype not in _DTYPES:
        raise WireError(f"{field}: unknown dtype {dtype!r} of a Box. Known: {', '.join(_DTYPES)}.")
    _check_shape(shape, field)
    return spaces.Box(_limits(value["low"], dtype), _limits(value["high"], dtype), tuple(shape), np.dtype(dtype).type)


def _limits(value: Any, dtype: str) -> Any:
    if isinstance(value, dict):
        return decode_array(value, "low or high")
    return np.array(value, np.dtype(dtype)) if isinstance(value, list) else value


def _multi_binary(value: Message, field: str) -> "Space[Any]":
    n = value["n"]
    _check_shape(n if isinstance(n, list) else [n], field)
    return spaces.MultiBinary(n)


def _check_shape(shape: Any, field: str) -> None:
    if type(shape) is not list or not all(type(size) is int and size >= 0 for size in shape):
        raise WireError(f"{field}: shape {shape!r} is not a list of integers of at least 0")
    # A larger sample would not fit into a frame, so such a space could only exhaust this process's memory.
    if math.prod(shape) > MAX_FRAME_BYTES:
        raise WireError(f"{field}: {math.prod(shape):,} elements do not fit into a frame of {MAX_FRAME_BYTES:,} bytes")


_SPACES: dict[str, Callable[[Message, str], "Space[Any]"]] = {
    "Box": _box,
    "Discrete": lambda v, _: spaces.Discrete(v["n"], start=v.get("start", 0), dtype=v.get("dtype", "int64")),
    "MultiDiscrete": lambda v, _: spaces.MultiDiscrete(v["nvec"], v.get("dtype", "int64"), start=v.get("start")),
    "MultiBinary": _multi_binary,
    # Pairs, since gymnasium sorts a plain dict and flattening depends on the order.
    "Dict": lambda v, f: spaces.Dict([(key, decode_space(part, f"{f}[{key!r}]")) for key, part in v["spaces"].items()]),
    "Tuple": lambda v, f: spaces.Tuple([decode_space(part, f"{f}[{n}]") for n, part in enumerate(v["spaces"])]),
    "Text": lambda v, _: spaces.Text(v["max_length"], min_length=v.get("min_length", 1), charset=v["charset"]),
}
