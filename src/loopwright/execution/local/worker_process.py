"""The parent's side of a Python worker: a socket for calls, two pipes for output, and a process tree."""

import asyncio
import marshal
import math
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from loopwright.core.errors import StorageError, storage
from loopwright.core.progress import Reporter
from loopwright.execution.base import CallResult, FunctionCall, OnStart, Usage
from loopwright.execution.local import worker_main
from loopwright.execution.local.executor import CappedFile, Pump
from loopwright.execution.local.process_tree import (
    Exit,
    ProcessLimits,
    ProcessTree,
    describe,
    exhaustion,
    new_pids,
    spawn,
)
from loopwright.execution.local.processes import MARKER_VARIABLE

Frame = dict[str, Any]

# As a file instead of -m, which would import this package, and as bytecode, which need not be compiled; -P keeps its
# directory off sys.path.
_SOURCE, _BYTECODE = Path(worker_main.__file__), Path(worker_main.__spec__.cached or "")
_IS_CURRENT = _BYTECODE.is_file() and _BYTECODE.stat().st_mtime >= _SOURCE.stat().st_mtime
COMMAND = (sys.executable, "-P", str(_BYTECODE if _IS_CURRENT else _SOURCE))
_IMPORT_S = 60.0
_RECEIVE_BYTES = 8192


class WorkerProcess:
    """A worker that handles one call at a time, and another one as long as it is `usable`."""

    def __init__(
        self, call: FunctionCall, environment: Mapping[str, str], limits: ProcessLimits, grace_s: float
    ) -> None:
        self.usable = False
        self._environment, self._path, self._limits = environment, call.path, limits
        self._grace_s = grace_s
        # The worker has its own marker, since the trial's changes from call to call.
        self._marker = f"worker-{uuid.uuid4().hex}"
        self._imported: set[str] = set()
        self._response: Frame | None = None
        self._ready = self._disconnected = False
        self._on_report: Reporter | None = None
        self._error: StorageError | None = None
        self._exit: Exit | None = None
        self._spent_s = 0.0, 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._files: tuple[CappedFile, ...] = ()
        self._pumps: list[Pump] = []
        try:
            self._socket = FrameSocket(self._on_frame)
            try:
                for _ in ("stdout", "stderr"):
                    self._pumps.append(Pump(self._on_error))
                self._tree = self._spawn(call.marker)
            except BaseException:
                self._close_files()
                raise
        except OSError as error:
            if (problem := exhaustion(error)) is not None:
                raise problem from error
            raise
        self._snapshot = self._tree.start
        self._socket.send({"path": [str(entry) for entry in call.path]})

    @property
    def is_alive(self) -> bool:
        """Whether the process runs and can still respond."""
        return self._tree.is_alive and not self._disconnected

    def fits(self, environment: Mapping[str, str], path: tuple[Path, ...], limits: ProcessLimits) -> bool:
        """Whether this worker has the environment, path and limits of a call."""
        # Identity first: comparing environments costs a tenth of a call, and they are usually the same object.
        return (
            (self._environment is environment or self._environment == environment)
            and (self._path is path or self._path == path)
            and (self._limits is limits or self._limits == limits)
        )

    async def call(self, call: FunctionCall, output_bytes: int, on_start: OnStart) -> CallResult:
        """Make a call. Unless the worker responds normally, it is gone afterwards."""
        self._attach(asyncio.get_running_loop())
        self._response, self._ready, self.usable = None, False, False
        self._on_report = call.on_report
        directory = str(call.directory)
        self._files = CappedFile(f"{directory}/stdout", output_bytes), CappedFile(f"{directory}/stderr", output_bytes)
        for pump, file in zip(self._pumps, self._files, strict=True):
            pump.sink = file
        start_s = time.monotonic()
        try:
            on_start(f"{self._tree.pid}:{self._tree.start_ticks}")
            self._socket.send(
                {
                    "function": call.function,
                    "arguments": orjson.loads(orjson.dumps(call.arguments)),
                    "directory": directory,
                    "parameters": call.parameters.decode(),
                    "variable": self._variable(call.marker),
                    "reports": call.on_report is not None,
                    "checkpoint": None if call.checkpoint is None else str(call.checkpoint),
                }
            )
            await self._wait(call)
            result = await self._finish(call, time.monotonic() - start_s)
        except BaseException:
            await self._end(self._grace_s)
            with suppress(StorageError):
                self._finish_files()
            raise
        if self._tree.interrupted:
            raise asyncio.CancelledError
        return result

    def kill(self) -> None:
        """SIGKILL the worker and what it started, without waiting."""
        if self._exit is None:
            self._tree.kill()

    async def close(self) -> None:
        """Disconnect from an idle worker, which makes it exit, and release it."""
        self._attach(asyncio.get_running_loop())
        self._socket.close()
        await self._tree.wait_for_exit(self._grace_s)
        await self._end(0.0)
        if self._tree.interrupted:
            raise asyncio.CancelledError

    async def _wait(self, call: FunctionCall) -> None:
        """Wait for the response, the worker's end, a full disk, or the timeout."""
        if call.function not in self._imported:
            await self._tree.wait(max(call.timeout_s, _IMPORT_S) if call.timeout_s is not None else None)
            if not self._ready:
                return
            self._imported.add(call.function)
            if not self.is_alive or self._response is not None or self._error is not None:
                return
        await self._tree.wait(call.timeout_s)

    async def _finish(self, call: FunctionCall, wall_s: float) -> CallResult:
        response = self._response
        if response is not None and response["output"]:
            for pump in self._pumps:
                pump.drain()
        if self._error is not None:
            await self._end(0.0)
            raise self._error
        if response is None:
            return await self._finish_without_response(wall_s)
        self._finish_files()
        if "storage" in response:
            number, reason = response["storage"]
            with storage(call.directory):
                raise OSError(number, reason)
        self._snapshot, pids = new_pids(self._snapshot)
        # What it left running would disturb the next measurement, and is ended with it.
        self.usable = response["usable"] and not self._tree.has_descendants(pids)
        if not self.usable:
            await self._end(0.0)
        usage: Usage = response["usage"]
        self._spent_s = self._spent_s[0] + usage["user_s"], self._spent_s[1] + usage["system_s"]
        value: dict[str, int | float] | None = response.get("value")
        if value is not None and (nonfinite := response["nonfinite"]):
            value |= {name: float(text) for name, text in nonfinite.items()}
        return CallResult(
            usage,
            *self._output_sizes(),
            value=value,
            error=response.get("error"),
            stopped="stopped" in response,
        )

    async def _finish_without_response(self, wall_s: float) -> CallResult:
        timed_out = self.is_alive
        if self._disconnected:
            # The socket closes a moment before the process is gone; one that continues without it must be ended.
            await self._tree.wait_for_exit(self._grace_s)
        exit_ = await self._end(self._grace_s if timed_out else 0.0)
        if self._error is not None:
            raise self._error
        for file in self._files:
            file.open_if_missing()
        self._finish_files()
        usage = {
            "wall_s": wall_s,
            "user_s": max(0.0, exit_.usage["user_s"] - self._spent_s[0]),
            "system_s": max(0.0, exit_.usage["system_s"] - self._spent_s[1]),
        }
        worker_exit = None if timed_out else describe(exit_)
        return CallResult(usage, *self._output_sizes(), timed_out=timed_out, worker_exit=worker_exit)

    def _output_sizes(self) -> tuple[int, int]:
        stdout, stderr = self._files
        return stdout.produced_bytes, stderr.produced_bytes

    def _finish_files(self) -> None:
        for pump, file in zip(self._pumps, self._files, strict=True):
            pump.sink = None
            if file.produced_bytes:
                file.finish()
            else:
                file.close()

    async def _end(self, grace_s: float) -> Exit:
        """End and release the worker and what it started. Safe to call twice."""
        self.usable = False
        if self._exit is None:
            await self._tree.end(grace_s)
            for pump in self._pumps:
                pump.drain()
            try:
                self._exit = self._tree.reap()
            finally:
                self._close_files()
        return self._exit

    def _close_files(self) -> None:
        self._socket.close()
        for pump in self._pumps:
            pump.close()

    def _spawn(self, marker: str) -> ProcessTree:
        child = self._socket.child.fileno()
        tree = spawn(
            [*COMMAND, str(child)],
            directory=Path("/"),
            environment={**self._environment, MARKER_VARIABLE: self._variable(marker)},
            stdout=self._pumps[0].write_fd,
            stderr=self._pumps[1].write_fd,
            limits=self._limits,
            marker=self._marker,
            pass_fds=[child],
        )
        self._socket.child.close()
        return tree

    def _variable(self, marker: str) -> str:
        return f"{self._environment.get(MARKER_VARIABLE, '')}:{marker}:{self._marker}"

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not loop:
            self._loop = loop
            self._socket.attach(loop)
            for pump in self._pumps:
                pump.attach(loop)

    def _on_frame(self, frame: Frame | None) -> None:
        if frame is None:
            self._disconnected = True
        elif "ready" in frame:
            self._ready = True
        elif "report" in frame:
            step, metrics = frame["report"]
            numbers = {name: math.nan if value is None else value for name, value in metrics.items()}
            self._socket.send({"stop": self._on_report is not None and self._on_report(step, numbers)})
            return
        else:
            self._response = frame
        self._tree.wake()

    def _on_error(self, error: StorageError) -> None:
        self._error = self._error or error
        self._tree.wake()


class FrameSocket:
    """The parent's end of a socket with frames, each after its length in four bytes; it never blocks. They are written
    with `marshal`, which both ends have without an import.

    `on_frame` is called with each frame, and with None when the worker disconnects.
    """

    def __init__(self, on_frame: Callable[[Frame | None], None]) -> None:
        self._socket, self.child = socket.socketpair()
        self._socket.setblocking(False)
        self._on_frame = on_frame
        self._incoming = bytearray()
        self._outgoing = b""
        self._writing = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Receive frames from now on."""
        self.detach()
        self._loop = loop
        loop.add_reader(self._socket, self._on_readable)
        self._on_writable()

    def detach(self) -> None:
        """Stop receiving. Safe to call twice, and after the loop was closed."""
        if self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._socket)
                self._loop.remove_writer(self._socket)
            self._loop, self._writing = None, False

    def send(self, frame: Frame) -> None:
        """Send a frame, now or as soon as the worker reads. If the worker is gone, its end is noticed elsewhere."""
        body = marshal.dumps(frame)
        self._outgoing += len(body).to_bytes(4, "big") + body
        self._on_writable()

    def close(self) -> None:
        """Close both ends."""
        self.detach()
        self._socket.close()
        self.child.close()

    def _on_writable(self) -> None:
        try:
            if self._outgoing:
                self._outgoing = self._outgoing[self._socket.send(self._outgoing) :]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing = b""
        if self._loop is not None and bool(self._outgoing) is not self._writing:
            self._writing = not self._writing
            if self._writing:
                self._loop.add_writer(self._socket, self._on_writable)
            else:
                self._loop.remove_writer(self._socket)

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.detach()
            self._on_frame(None)
            return
        if not self._incoming and len(data) == 4 + int.from_bytes(data[:4], "big"):
            # Nearly always: exactly one frame.
            self._on_frame(marshal.loads(data[4:]))  # noqa: S302  Our own worker wrote it.
            return
        self._incoming += data
        while len(self._incoming) >= 4:
            end = 4 + int.from_bytes(self._incoming[:4], "big")
            if len(self._incoming) < end:
                return
            frame = marshal.loads(self._incoming[4:end])  # noqa: S302
            del self._incoming[:end]
            self._on_frame(frame)
