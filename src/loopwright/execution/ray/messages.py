"""What the driver and a host send each other: JSON, with files as blobs behind it. Nothing is unpickled."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loopwright.execution.base import CallResult, Command, Completion, FunctionCall

Work = Command | FunctionCall
Blobs = Sequence[bytes]
Message = tuple[Mapping[str, Any], Blobs]

_TYPES: Mapping[str, Any] = {each.__name__: each for each in (Command, FunctionCall, Completion, CallResult)}
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "argv": tuple,
    "directory": Path,
    "stdout": Path,
    "stderr": Path,
    "path": lambda entries: tuple(map(Path, entries)),
    "parameters": str.encode,
    "checkpoint": lambda path: None if path is None else Path(path),
}
"""How to read the fields of trials that are not JSON values."""


@dataclass(frozen=True)
class Package:
    """The files that a trial needs and that its node does not see."""

    directory: bytes = b""
    modules: tuple[bytes, ...] = ()
    """The Python files of each entry of a call's path."""


@dataclass(frozen=True)
class HostAnswer:
    """How a command or a call ended on a node."""

    value: Completion | CallResult | None = None
    files: bytes = b""
    """What it has written, where the node does not share the driver's file system."""
    error: str = ""
    infra: bool = False
    cancelled: bool = False


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as JSON. NaN, large integers and file names that are not UTF-8 survive."""
    return _ENCODER.encode(message).encode()


def decode(data: bytes) -> dict[str, Any]:
    """A message that was encoded. ValueError if it was not."""
    message = json.loads(data)
    if not isinstance(message, dict):
        raise ValueError("a message is a JSON object")
    return message


def trial_message(key: str, work: Work, last: Work | None = None, package: Package | None = None) -> Message:
    """A trial to start. Most of it is the same in the whole run, so only what differs from the last one is sent."""
    message: dict[str, Any] = {"do": "use", "key": key, "packed": package is not None}
    fields, known = vars(work), {} if last is None else vars(last)
    if last is None:
        message["type"] = type(work).__name__
    # Identity first: comparing environments and paths costs more than the rest. Arguments always: 1, 1.0 and True are
    # equal. What a function reports stays on its node.
    message["fields"] = {
        name: new
        for name, new in fields.items()
        if name == "arguments"
        or (name != "on_report" and (new is not (old := known.get(name, _UNKNOWN)) and new != old))
    }
    return message, () if package is None else (package.directory, *package.modules)


def read_trial(message: Mapping[str, Any], blobs: Blobs, last: Work | None) -> tuple[Work, Package | None]:
    """The trial of a message, and its files."""
    fields = {name: _READERS[name](value) if name in _READERS else value for name, value in message["fields"].items()}
    work = replace(last, **fields) if last is not None and "type" not in message else _TYPES[message["type"]](**fields)
    return work, Package(blobs[0], tuple(blobs[1:])) if message["packed"] else None


def answer_message(answer: HostAnswer) -> Message:
    """How a trial ended."""
    blobs = (answer.files,) if answer.files else ()
    if answer.value is not None:
        return {"type": type(answer.value).__name__, "value": vars(answer.value)}, blobs
    return {"error": answer.error, "infra": answer.infra, "cancelled": answer.cancelled}, blobs


def read_answer(message: Mapping[str, Any], blobs: Blobs) -> HostAnswer:
    """The answer of a message."""
    files = blobs[0] if blobs else b""
    if "value" in message:
        return HostAnswer(_TYPES[message["type"]](**message["value"]), files)
    return HostAnswer(None, files, message["error"], message["infra"], message["cancelled"])


def _plain(value: object) -> Any:
    match value:
        case Path():
            return str(value)
        case bytes():
            return value.decode()
        case Mapping():
            return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be sent to a Ray node")


_ENCODER = json.JSONEncoder(default=_plain, separators=(",", ":"), check_circular=False)
_UNKNOWN = object()
"""Not equal to any field."""
