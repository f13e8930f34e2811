"""The child's side of a Python worker: reads calls from a socket, runs them, responds.

Run as a script with the socket's number, or with two files, for one call or question. It imports nothing of Loopwright
and only what a call needs, so that a worker starts in milliseconds and a user's modules get a clean interpreter: even
`typing` takes longer than a small call.
"""

from __future__ import annotations

import atexit
import fcntl
import marshal
import os
import resource
import sys
import termios
import time
from _thread import _count, allocate_lock
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Frame = dict[str, Any]

_MAX_VALUE_BYTES = 1024 * 1024
_MAX_ERROR_CHARS = 64 * 1024
_NO_BYTES = bytes(4)
_MARKER_VARIABLE = "LOOPWRIGHT_TRIAL"
_CHECKPOINT_VARIABLE = "LOOPWRIGHT_CHECKPOINT"

loopwright_report: Callable[[int, Any], bool] | None = None
"""What `loopwright.report` calls in a worker."""


class CallServer:
    """The connection to the parent, and the callables imported so far."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()
        self._callables: dict[str, Callable[..., Any]] = {}
        self._reports = self._stopped = False
        self._reporting = allocate_lock()
        self._streams = sys.stdout, sys.stderr
        self._pipes = _file_id(1), _file_id(2)
        self._directory, self._parameters = "", b""
        """Those of the last call."""

    def serve(self) -> None:
        """Handle calls until the parent disconnects."""
        atexit.register(self._leave_directory)  # called last, since the callables register theirs later
        hello = self._receive() or {}
        sys.path[:0] = hello.get("path", [])
        while (frame := self._receive()) is not None:
            self._send(self.call(frame))

    def call(self, frame: Frame) -> Frame:
        """Make a call and return the response."""
        try:
            self._enter_directory(frame["directory"], frame["parameters"].encode())
            if frame["checkpoint"] is not None:
                os.makedirs(frame["checkpoint"], exist_ok=True)  # noqa: PTH103
        except OSError as error:
            return {"storage": [error.errno, error.strerror], "usable": True, "output": False}
        # For processes that the callable starts; our own entry in the process table keeps the marker we started with.
        os.environ[_MARKER_VARIABLE] = frame["variable"]
        if frame["checkpoint"] is not None:
            os.environ[_CHECKPOINT_VARIABLE] = frame["checkpoint"]
        elif _CHECKPOINT_VARIABLE in os.environ:
            del os.environ[_CHECKPOINT_VARIABLE]
        response: Frame
        self._reports, self._stopped = frame["reports"], False
        start, start_s = _cpu_times(), time.perf_counter()
        try:
            function = self._callables.get(frame["function"])
            if function is None:
                function = self._callables[frame["function"]] = _look_up(frame["function"])
                # The import has its own deadline; that of the trial starts now.
                if self._fd >= 0:
                    self._send({"ready": True})
                start, start_s = _cpu_times(), time.perf_counter()
            value = function(**frame["arguments"])
            if hasattr(value, "__await__"):
                value = _run(value)
            elif hasattr(value, "send"):
                value = consume(value, self.report)
            response = {"value": value}
        except BaseException as error:  # noqa: BLE001  Whatever a user's code raises is the trial's result.
            response = {"error": _format_error(error)}
        wall_s, end = time.perf_counter() - start_s, _cpu_times()
        # If the callable forked and returned twice, only the worker itself may respond.
        if os.getpid() != self._pid:
            os._exit(0)
        self._reports = False  # a thread that still reports would disturb the next call
        if self._stopped:
            response = {"stopped": True}
        elif "value" in response:
            response = metrics_of(response["value"])
        response["usable"] = self._flush(response.get("error"))
        # So that the parent, which is busier than we are, looks for output only if there is some.
        response["output"] = _has_unread_output(1) or _has_unread_output(2)
        response["usage"] = {"wall_s": wall_s, "user_s": end[0] - start[0], "system_s": end[1] - start[1]}
        return response

    def _enter_directory(self, directory: str, parameters: bytes) -> None:
        """Make the trial's directory, and work there."""
        # Creating files is most of the cost of a small call: stdout and stderr are created when something is printed,
        # and a directory without anything to keep becomes that of the next call.
        fd = self._rename_directory(directory)
        if fd < 0:
            try:
                os.mkdir(directory)  # noqa: PTH102  Path objects cost more than the call.
            except FileExistsError:
                pass
            except FileNotFoundError:
                os.makedirs(directory, exist_ok=True)  # noqa: PTH103
            os.chdir(directory)
            # Without O_TRUNC, after which ext4 writes to the disk at once.
            fd = os.open("parameters.json", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _write_all(fd, parameters)
            os.ftruncate(fd, len(parameters))
        finally:
            os.close(fd)
        self._directory, self._parameters = os.getcwd(), parameters  # noqa: PTH109

    def _rename_directory(self, directory: str) -> int:
        """Give the last call's directory to this one, and open its parameters.json. -1 if something in it is to keep,
        or if it is elsewhere by now.
        """
        fd = self._open_unused()
        if fd >= 0:
            try:
                os.rename(self._directory, directory)  # noqa: PTH104
            except OSError:
                os.close(fd)
                return -1
        return fd

    def _leave_directory(self) -> None:
        if os.getpid() == self._pid and self._open_unused() >= 0:
            os.unlink("parameters.json")  # noqa: PTH108
            os.rmdir(self._directory)  # noqa: PTH106

    def _open_unused(self) -> int:
        """The last call's parameters.json, if nothing else was written to the directory, and no thread is left that
        could; otherwise -1.
        """
        try:
            if _count() or os.getcwd() != self._directory or os.listdir() != ["parameters.json"]:  # noqa: PTH109, PTH208
                return -1
            fd = os.open("parameters.json", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            if os.pread(fd, len(self._parameters) + 1, 0) == self._parameters and os.fstat(fd).st_nlink == 1:
                return fd
            os.close(fd)
        except OSError:
            pass
        return -1

    def report(self, step: int, metrics: Any) -> bool:
        """Send the metrics of a step; return whether the trial should stop. A forked process reports nothing."""
        with self._reporting:
            if self._reports and not self._stopped and os.getpid() == self._pid:
                numbers = {str(name): _number(value) for name, value in metrics.items()}
                self._send({"report": [int(step), numbers]})
                self._stopped = bool((self._receive() or {"stop": True})["stop"])
            return self._stopped

    def _flush(self, error: str | None) -> bool:
        """Flush all output to the pipes; return whether this worker can take another call."""
        try:
            for stream in (sys.stdout, sys.stderr, *self._streams):
                stream.flush()
            sys.stdout, sys.stderr = self._streams
            if error:
                _write_all(2, error.encode(errors="backslashreplace"))
            return (_file_id(1), _file_id(2)) == self._pipes
        except Exception:  # noqa: BLE001  The callable may have replaced or closed the streams.
            return False

    def _receive(self) -> Frame | None:
        header = self._read(4)
        body = self._read(int.from_bytes(header, "big")) if header is not None else None
        return marshal.loads(body) if body is not None else None  # noqa: S302  The parent wrote it.

    def _read(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            chunk = os.read(self._fd, count - len(data))
            if not chunk:
                return None
            data += chunk
        return data

    def _send(self, response: Frame) -> None:
        body = marshal.dumps(response)
        _write_all(self._fd, len(body).to_bytes(4, "big") + body)


def _answer_file(source: str, target: str) -> None:
    """Make the call of a file, or describe the callable that it names."""
    import json

    with open(source, encoding="utf-8") as file:  # noqa: PTH123  Path is not imported, which takes time.
        frame = json.load(file)
    sys.path[:0] = frame["path"]
    is_question = "describe" in frame
    response = _describe(frame["describe"]) if is_question else CallServer(-1).call(frame)
    with open(f"{target}.part", "w", encoding="utf-8") as file:  # noqa: PTH123
        json.dump(response, file)
    os.rename(f"{target}.part", target)  # noqa: PTH104
    if is_question:
        os._exit(0)  # nobody waits for the threads of its module


class _NotFoundError(LookupError):
    """The callable does not exist; the message lists the alternatives."""


def _look_up(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise _NotFoundError(f"{name!r} is not of the form 'module:callable'.")
    target: Any = import_module(module_name)
    source = getattr(target, "__file__", None) or module_name
    for part in attribute.split("."):
        if not hasattr(target, part):
            public = [key for key in dir(target) if not key.startswith("_") and callable(getattr(target, key, None))]
            raise _NotFoundError(f"{source} has no {attribute!r}. It has: {', '.join(public[:20]) or 'no callable'}.")
        target = getattr(target, part)
    if not callable(target):
        raise _NotFoundError(f"{attribute!r} in {source} is a {type(target).__name__}, not a callable.")
    return target  # type: ignore[no-any-return]


def _describe(name: str) -> Frame:
    """The keyword arguments of a callable, or why it cannot be called."""
    import inspect

    try:
        function = _look_up(name)
    except _NotFoundError as error:
        return {"problem": str(error)}
    except BaseException as error:  # noqa: BLE001  A module may raise anything while it is imported.
        import traceback

        last = traceback.format_exception_only(error)[-1].strip()
        return {"problem": f"importing {name.partition(':')[0]!r} failed: {last}"}
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {"accepts": [], "requires": [], "any": True}
    keywords = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {
        "accepts": [p.name for p in keywords],
        "requires": [p.name for p in keywords if p.default is p.empty],
        "any": any(p.kind is p.VAR_KEYWORD for p in parameters),
    }


def consume(generator: Any, report: Callable[[int, Any], bool]) -> Any:
    """Report what a generator yields, metrics or (step, metrics); return what it returns, or else its last metrics."""
    step, metrics = 0, None
    while True:
        try:
            metrics = next(generator)
        except StopIteration as end:
            return metrics if end.value is None else end.value
        step += 1
        if isinstance(metrics, tuple):
            step, metrics = metrics
        elif isinstance(metrics, dict) and "step" in metrics:
            step, metrics = metrics["step"], {name: value for name, value in metrics.items() if name != "step"}
        if report(step, metrics if isinstance(metrics, dict) else {"value": metrics}):
            generator.close()
            return metrics


def metrics_of(value: object) -> Frame:
    """The return value as a response; an error unless it is a dict of numbers, or one number, the metric `value`."""
    if not isinstance(value, dict):
        if isinstance(value, bool) or _number(value) is None:
            return _value_error(f"it returned {_short(value)}")
        value = {"value": value}
    finite: dict[str, int | float] = {}
    nonfinite: dict[str, str] = {}
    for name, number in value.items():
        if not isinstance(name, str):
            return _value_error(f"the name {_short(name)} is not a string")
        if type(name) is not str or not name.isascii():
            name = str.__str__(name)  # numpy's strings and enumerations are subclasses of str.
            try:
                name.encode()
            except UnicodeEncodeError as error:
                return _value_error(str(error))
        plain = _number(number)
        if plain is None:
            return _value_error(f"{name!r} is {_short(number)}")
        if isinstance(plain, float) and plain - plain != 0.0:
            nonfinite[name] = str(plain)  # JSON has no infinity and no NaN.
        else:
            finite[name] = plain
    if (size := len(marshal.dumps((finite, nonfinite)))) > _MAX_VALUE_BYTES:
        return _value_error(f"it returned {len(value)} of them, {size} bytes; the limit is {_MAX_VALUE_BYTES}")
    return {"value": finite, "nonfinite": nonfinite}


def _value_error(reason: str) -> Frame:
    return {"error": f"The function must return a dict of metric names and numbers, or one number, but {reason}.\n"}


def _number(value: Any) -> int | float | None:
    if type(value) is not float and type(value) is not int:
        try:
            # numpy scalars, and arrays and tensors of one element, have a plain value.
            value = value.item() if hasattr(value, "item") else value
            if isinstance(value, str | bytes | complex):
                return None
            value = int(value) if isinstance(value, int) else float(value)
        except Exception:  # noqa: BLE001  Conversion runs the value's own code.
            return None
    if type(value) is int and not -(2**63) <= value < 2**63:
        try:
            return float(value)
        except OverflowError:
            return None
    return value  # type: ignore[no-any-return]


def _short(value: object) -> str:
    import reprlib

    return f"{reprlib.repr(value)[:200]} ({type(value).__name__})"


def _run(awaitable: Any) -> Any:
    import asyncio

    async def main() -> Any:
        return await awaitable

    return asyncio.run(main())


def _format_error(error: BaseException) -> str:
    """The traceback without our own frame at its top."""
    import traceback

    trace = error.__traceback__.tb_next if error.__traceback__ else None
    try:
        text = "".join(traceback.format_exception(type(error), error, trace))
    except Exception:  # noqa: BLE001  An exception's own __str__ may fail.
        text = f"{type(error).__name__}\n"
    half = _MAX_ERROR_CHARS // 2
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:half]}\n[...]\n{text[-half:]}"


def _cpu_times() -> tuple[float, float]:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + children.ru_utime, own.ru_stime + children.ru_stime


def _file_id(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _has_unread_output(fd: int) -> bool:
    try:
        return fcntl.ioctl(fd, termios.FIONREAD, _NO_BYTES) != _NO_BYTES
    except OSError:
        return True


def _write_all(fd: int, data: bytes) -> None:
    count = 0
    while count < len(data):
        count += os.write(fd, data[count:])


def main() -> None:
    """Serve the socket given on the command line, or answer the first file in the second."""
    files, sys.argv[1:] = sys.argv[1:], []
    if len(files) == 1:
        os.set_inheritable(int(files[0]), False)
    # Line-buffered, so that a callable that crashes or is killed leaves what it printed.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    if len(files) == 2:
        _answer_file(*files)
        return
    global loopwright_report
    server = CallServer(int(files[0]))
    loopwright_report = server.report
    try:
        server.serve()
    except (BrokenPipeError, ConnectionResetError):
        return  # The parent is gone.


if __name__ == "__main__":
    main()
