"""The child's side of a Python worker: takes calls from a socket, runs them, answers.

Run as a script with the socket's number: it imports nothing of Loopwright and only the little that a call needs, so
that a worker starts in milliseconds and a user's modules meet a clean interpreter.
"""

import fcntl
import importlib
import os
import reprlib
import resource
import sys
import termios
import time
import traceback
from collections.abc import Callable
from typing import Any

import orjson

Frame = dict[str, Any]

_VALUE_BYTES = 1024 * 1024
_ERROR_CHARS = 64 * 1024
_NO_BYTES = bytes(4)
_VARIABLE = "LOOPWRIGHT_TRIAL"


class Worker:
    """One connection to the parent, and the callables that were looked up so far."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()
        self._callables: dict[str, Callable[..., Any]] = {}
        self._streams = sys.stdout, sys.stderr
        self._pipes = _identity(1), _identity(2)

    def serve(self) -> None:
        """Answer calls until the parent hangs up."""
        hello = self._receive() or {}
        sys.path[:0] = hello.get("path", [])
        while (frame := self._receive()) is not None:
            self._send(self._describe(frame["check"]) if "check" in frame else self._call(frame))

    def _call(self, frame: Frame) -> Frame:
        try:
            self._enter(frame)
        except OSError as error:
            return {"storage": [error.errno, error.strerror], "usable": True, "output": False}
        answer: Frame
        before, start_s = _used(), time.perf_counter()
        try:
            function = self._callables.get(frame["function"])
            if function is None:
                function = self._import(frame["function"])
                before, start_s = _used(), time.perf_counter()
            value = function(**frame["arguments"])
            if hasattr(value, "__await__"):
                value = _finish(value)
            answer = {"value": value}
        except BaseException as error:  # noqa: BLE001  Whatever a user's code raises is this trial's result.
            answer = {"error": _explain(error)}
        wall_s, after = time.perf_counter() - start_s, _used()
        # A callable that forked and came back twice: only the worker itself may answer.
        if os.getpid() != self._pid:
            os._exit(0)
        if "value" in answer:
            answer = _metrics(answer["value"])
        answer["usable"] = self._leave(answer.get("error"))
        # So that the parent, which has more to do than we, looks only if there is something.
        answer["output"] = _waiting(1) or _waiting(2)
        answer["usage"] = [wall_s, after[0] - before[0], after[1] - before[1]]
        return answer

    def _enter(self, frame: Frame) -> None:
        directory = frame["directory"]
        try:
            os.mkdir(directory)  # noqa: PTH102  Path objects cost more than the call.
        except FileExistsError:
            pass
        except FileNotFoundError:
            os.makedirs(directory, exist_ok=True)  # noqa: PTH103
        os.chdir(directory)
        # Making files is what a small call costs most: stdout and stderr are made when there is something in them.
        fd = os.open("parameters.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            data = frame["parameters"].encode()
            while data:
                data = data[os.write(fd, data) :]
        finally:
            os.close(fd)
        # For what the callable starts; our own entry in the process table keeps the marker that we were started with.
        os.environ[_VARIABLE] = frame["variable"]

    def _leave(self, error: str | None) -> bool:
        """Flush, so that the parent finds all output in the pipes; return whether this worker can take another call."""
        try:
            for stream in (sys.stdout, sys.stderr, *self._streams):
                stream.flush()
            sys.stdout, sys.stderr = self._streams
            if error:
                _write_all(2, error.encode(errors="backslashreplace"))
            return (_identity(1), _identity(2)) == self._pipes
        except Exception:  # noqa: BLE001  The callable may have put anything there, or closed ours.
            return False

    def _import(self, name: str) -> Callable[..., Any]:
        function = self._callables[name] = _look_up(name)
        # Importing has a deadline of its own; the trial's begins now.
        self._send({"ready": True})
        return function

    def _describe(self, name: str) -> Frame:
        try:
            function = _look_up(name)
        except _NotThereError as error:
            return {"problem": str(error)}
        except BaseException as error:  # noqa: BLE001  A module may raise anything while it is imported.
            last = traceback.format_exception_only(error)[-1].strip()
            return {"problem": f"importing {name.partition(':')[0]!r} failed: {last}"}
        return _signature(function)

    def _receive(self) -> Frame | None:
        header = self._read(4)
        body = self._read(int.from_bytes(header, "big")) if header is not None else None
        return orjson.loads(body) if body is not None else None

    def _read(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            chunk = os.read(self._fd, count - len(data))
            if not chunk:
                return None
            data += chunk
        return data

    def _send(self, answer: Frame) -> None:
        body = orjson.dumps(answer)
        _write_all(self._fd, len(body).to_bytes(4, "big") + body)


class _NotThereError(LookupError):
    """There is no such callable; the message says what there is."""


def _look_up(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise _NotThereError(f"{name!r} is not of the form 'module:callable'.")
    found: Any = importlib.import_module(module_name)
    where = getattr(found, "__file__", None) or module_name
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [key for key in dir(found) if not key.startswith("_") and callable(getattr(found, key, None))]
            raise _NotThereError(f"{where} has no {attribute!r}. It has: {', '.join(public[:20]) or 'no callable'}.")
        found = getattr(found, part)
    if not callable(found):
        raise _NotThereError(f"{attribute!r} in {where} is a {type(found).__name__}, not a callable.")
    return found  # type: ignore[no-any-return]


def _signature(function: Callable[..., Any]) -> Frame:
    import inspect

    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {"accepts": [], "requires": [], "any": True}
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {
        "accepts": [p.name for p in named],
        "requires": [p.name for p in named if p.default is p.empty],
        "any": any(p.kind is p.VAR_KEYWORD for p in parameters),
    }


def _metrics(value: object) -> Frame:
    """What a callable returned, if it is a dict of numbers."""
    if not isinstance(value, dict):
        return _refuse(f"it returned {_short(value)}")
    finite: dict[str, int | float] = {}
    others: dict[str, str] = {}
    for name, number in value.items():
        if not isinstance(name, str):
            return _refuse(f"the name {_short(name)} is not a string")
        plain = _number(number)
        if plain is None:
            return _refuse(f"{name!r} is {_short(number)}")
        if isinstance(plain, float) and plain - plain != 0.0:
            others[name] = str(plain)  # JSON has no infinity and no NaN.
        else:
            finite[name] = plain
    try:
        size = len(orjson.dumps(finite)) + len(orjson.dumps(others))
    except (TypeError, ValueError) as error:
        return _refuse(str(error))
    if size > _VALUE_BYTES:
        return _refuse(f"it returned {len(value)} of them, {size} bytes; the most is {_VALUE_BYTES}")
    return {"value": finite, "others": others}


def _refuse(reason: str) -> Frame:
    return {"error": f"The callable must return a dict of metric names and numbers, but {reason}.\n"}


def _number(value: Any) -> int | float | None:
    if type(value) is not float and type(value) is not int:
        try:
            # numpy's scalars, and arrays and tensors of one element, know their plain value.
            value = value.item() if hasattr(value, "item") else value
            if isinstance(value, str | bytes | complex):
                return None
            value = int(value) if isinstance(value, int) else float(value)
        except Exception:  # noqa: BLE001  Conversion is the value's own code.
            return None
    if type(value) is int and not -(2**63) <= value < 2**63:
        try:
            return float(value)
        except OverflowError:
            return None
    return value  # type: ignore[no-any-return]


def _short(value: object) -> str:
    return f"{reprlib.repr(value)[:200]} ({type(value).__name__})"


def _finish(awaitable: Any) -> Any:
    import asyncio

    async def outcome() -> Any:
        return await awaitable

    return asyncio.run(outcome())


def _explain(error: BaseException) -> str:
    """The traceback as the user knows it, without our own frame at its top."""
    trace = error.__traceback__.tb_next if error.__traceback__ else None
    try:
        text = "".join(traceback.format_exception(type(error), error, trace))
    except Exception:  # noqa: BLE001  An exception's own __str__ may fail.
        text = f"{type(error).__name__}\n"
    return text if len(text) <= _ERROR_CHARS else f"{text[: _ERROR_CHARS // 2]}\n[...]\n{text[-_ERROR_CHARS // 2 :]}"


def _used() -> tuple[float, float]:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + children.ru_utime, own.ru_stime + children.ru_stime


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _waiting(fd: int) -> bool:
    try:
        return fcntl.ioctl(fd, termios.FIONREAD, _NO_BYTES) != _NO_BYTES
    except OSError:
        return True


def _write_all(fd: int, data: bytes) -> None:
    written = 0
    while written < len(data):
        written += os.write(fd, data[written:])


def main() -> None:
    """Serve the socket named on the command line."""
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    sys.argv[1:] = []
    # By line, so that a callable that crashes or is killed leaves what it printed.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    try:
        Worker(fd).serve()
    except (BrokenPipeError, ConnectionResetError):
        return  # The parent is gone: there is nobody to answer.


if __name__ == "__main__":
    main()
