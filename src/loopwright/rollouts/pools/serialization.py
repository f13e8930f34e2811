"""What crosses to another process and back: requests, answers, and exceptions that keep their class.

We pickle to bytes ourselves. This is faster than Ray's serialization, gives the receiver its own objects instead of
read-only views of shared memory, and keeps Ray's wrappers out of exceptions.
"""

import importlib
import pickle
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

from loopwright.rollouts.pools.base import SerializationError

_MAIN = b"__main__"


@dataclass(frozen=True)
class PackedException:
    """An exception in transit: pickled as a whole where possible, and in parts from which it can be rebuilt."""

    pickled: bytes | None
    classes: tuple[tuple[str, str], ...]
    """Module and qualified name of its class and of all base classes, most derived first."""
    message: str
    state: bytes
    traceback: str


def pack(value: Any, what: str = "a request") -> bytes:
    """Any value as bytes; classes and functions that are defined in `__main__` are sent by value."""
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        if _MAIN not in data:
            return data
    except (pickle.PicklingError, AttributeError, TypeError):
        pass  # A lambda or a local class, which the slower pickler below can send.
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:  # An object's own pickling may raise anything.
        raise SerializationError(
            f"{what} of type {type(value).__qualname__} cannot be sent to another process: {error}. "
            "Remove locks, files and connections from it, or set workers = 0"
        ) from error


def unpack(data: bytes) -> Any:
    """The value that was packed."""
    return pickle.loads(data)  # noqa: S301  The data comes from our own processes only.


def pack_exception(error: BaseException) -> PackedException:
    """An exception in a form that can be sent."""
    pickled: bytes | None
    try:
        pickled = pack(error)
        if type(unpack(pickled)) is not type(error):
            pickled = None
    except Exception:  # noqa: BLE001  Its constructor takes other arguments than it stores, or it cannot be pickled.
        pickled = None
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  A broken __str__ must not hide the rest.
        message = f"(no message: {type(error).__qualname__}.__str__ fails)"
    state: dict[str, Any] = {}
    for name, value in vars(error).items():
        try:
            unpack(pack(value))
        except Exception:  # noqa: BLE001, S112  Attributes that cannot be sent are dropped.
            continue
        state[name] = value
    classes = tuple((each.__module__, each.__qualname__) for each in type(error).__mro__[:-1])
    return PackedException(pickled, classes, message, pack(state), "".join(traceback.format_exception(error)))


def unpack_exception(packed: PackedException, where: str) -> BaseException:
    """The exception that was sent, or its closest base class that can be imported here."""
    error = _unpickle(packed) or _rebuild(packed)
    error.add_note(f"raised in {where}:\n{packed.traceback.rstrip()}")
    return error


def _unpickle(packed: PackedException) -> BaseException | None:
    if packed.pickled is None:
        return None
    try:
        error = unpack(packed.pickled)
    except Exception:  # noqa: BLE001  Its module may exist only where it was raised.
        return None
    return error if isinstance(error, BaseException) else None


def _rebuild(packed: PackedException) -> BaseException:
    for depth, (module, name) in enumerate(packed.classes):
        message = packed.message if depth == 0 else f"{packed.classes[0][1]}: {packed.message}"
        try:
            cls: Any = importlib.import_module(module)
            for part in name.split("."):
                cls = getattr(cls, part)
            error: BaseException = cls.__new__(cls, message)
            error.args = (message,)
            if depth == 0:
                vars(error).update(unpack(packed.state))
            if str(error) == message:
                return error
        except Exception:  # noqa: BLE001, S112  It cannot be imported or built here: try its base class.
            continue
    return RuntimeError(f"{packed.classes[0][1]}: {packed.message}")
