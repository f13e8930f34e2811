"""What crosses to another process and back: requests, answers, and exceptions that arrive as themselves.

Parcels are bytes that we pickle ourselves. That is faster than to let Ray do it, gives the receiver objects of its own
instead of read-only views of shared memory, and keeps exceptions free of Ray's wrapping.
"""

import importlib
import pickle
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from loopwright.rollouts.pools.base import SerializationError

_MAIN = b"__main__"


@dataclass(frozen=True)
class PackedException:
    """An exception on its way: whole, or in the parts that can be sent."""

    whole: bytes | None
    kinds: tuple[tuple[str, str], ...]
    """Module and name of its class and of all that it derives from."""
    message: str
    state: bytes
    trace: str


def pack(value: Any, what: str = "a request") -> bytes:
    """Any value as bytes; classes and functions that only `__main__` has go along by value."""
    try:
        plain = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        if _MAIN not in plain:
            return plain
    except (pickle.PicklingError, AttributeError, TypeError):
        pass  # A lambda or a class within a function, which the slower pickler below can send.
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:  # Any object's own pickling may fail in any way.
        raise SerializationError(
            f"{what} of type {type(value).__qualname__} cannot be sent to another process: {error}. "
            "Leave out what holds locks, files or connections, or set workers = 0"
        ) from error


def unpack(parcel: bytes) -> Any:
    """The value that was packed."""
    return pickle.loads(parcel)  # noqa: S301  Of our own processes alone.


def pack_exception(error: BaseException) -> PackedException:
    """An exception made ready to be sent."""
    whole: bytes | None
    try:
        whole = pack(error)
        if type(unpack(whole)) is not type(error):
            whole = None
    except Exception:  # noqa: BLE001  A constructor with other arguments than it keeps, or contents that stay here.
        whole = None
    kinds = tuple((kind.__module__, kind.__qualname__) for kind in type(error).__mro__[:-1])
    trace = "".join(traceback.format_exception(error))
    return PackedException(whole, kinds, _text(error), pack(_sendable(vars(error))), trace)


def unpack_exception(failure: PackedException, where: str) -> BaseException:
    """The exception that was sent: its own class where this process knows it, else the nearest that it does know."""
    found = _whole(failure) or _rebuilt(failure)
    found.add_note(f"raised in {where}:\n{failure.trace.rstrip()}")
    return found


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  A broken __str__ must not cost us the rest.
        return f"(no message: {type(error).__qualname__}.__str__ fails)"


def _sendable(state: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in state.items():
        try:
            unpack(pack(value))
        except Exception:  # noqa: BLE001, S112  What stays behind is what cannot be sent.
            continue
        kept[name] = value
    return kept


def _whole(failure: PackedException) -> BaseException | None:
    if failure.whole is None:
        return None
    try:
        found = unpack(failure.whole)
    except Exception:  # noqa: BLE001  Its module may exist only where it was raised.
        return None
    return found if isinstance(found, BaseException) else None


def _rebuilt(failure: PackedException) -> BaseException:
    for depth, (module, name) in enumerate(failure.kinds):
        message = failure.message if depth == 0 else f"{failure.kinds[0][1]}: {failure.message}"
        try:
            kind: Any = importlib.import_module(module)
            for part in name.split("."):
                kind = getattr(kind, part)
            made: BaseException = kind.__new__(kind, message)
            made.args = (message,)
            if depth == 0:
                vars(made).update(unpack(failure.state))
            if str(made) == message:
                return made
        except Exception:  # noqa: BLE001, S112  Not here, or not to be made so: the next best.
            continue
    return RuntimeError(f"{failure.kinds[0][1]}: {failure.message}")
