"""Runs commands as local processes: event-driven, with capped output, and without leftovers.

Output is copied from a pipe to a file with a size cap, which keeps the beginning and the end and counts the middle.
Benchmarks print their result last, so the end of a long output is as valuable as its beginning.
"""

import asyncio
import os
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from loopwright.core.errors import StorageError, storage
from loopwright.execution.base import Command, Completion, Executor, OnStart
from loopwright.execution.local.process_tree import (
    Exit,
    ProcessLimits,
    ProcessTree,
    exhaustion,
    new_pids,
    spawn,
)
from loopwright.execution.local.processes import MARKER_VARIABLE
from loopwright.execution.local.usage_report import UsageReport
from loopwright.execution.slots import Slots

OUTPUT_BYTES = 64 * 1024 * 1024
GRACE_S = 2.0
TAIL_BYTES = 64 * 1024
_CHUNK_BYTES = 64 * 1024
_DRAIN_CHUNKS = 32
# O_APPEND, since a worker may truncate the file again after we have opened it.
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC


class LocalExecutor(Executor):
    """Runs up to `parallel` commands at a time, each in its own session."""

    def __init__(
        self,
        parallel: int = 1,
        memory_bytes: int | None = None,
        output_bytes: int = OUTPUT_BYTES,
        grace_s: float = GRACE_S,
        slots: Slots | None = None,
    ) -> None:
        self.slots: Slots = slots or Slots(parallel)
        self._memory_bytes = memory_bytes
        self._output_bytes = output_bytes
        self._grace_s = grace_s
        self._running: dict[ProcessTree, asyncio.Future[None]] = {}

    async def run(self, command: Command, on_start: OnStart) -> Completion:
        loop = asyncio.get_running_loop()
        slot = command.slot or await self.slots.acquire()
        with ExitStack() as stack:
            if command.slot is None:
                stack.callback(self.slots.release, slot)
            try:
                output = _Output(command, self._output_bytes, stack)
                report = None
                if command.measures_memory and UsageReport.can_measure(command):
                    report = UsageReport(stack)
                tree = spawn(
                    report.argv(command.argv) if report else command.argv,
                    directory=command.directory,
                    environment={
                        **command.environment,
                        **slot.variables,
                        MARKER_VARIABLE: f"{command.environment.get(MARKER_VARIABLE, '')}:{command.marker}",
                    },
                    stdout=output.pumps[0].write_fd,
                    stderr=output.pumps[1].write_fd,
                    limits=ProcessLimits(slot.cores, self._memory_bytes),
                    marker=command.marker,
                    stdin=report.write_fd if report else subprocess.DEVNULL,
                )
            except OSError as error:
                if (problem := exhaustion(error)) is not None:
                    raise problem from error
                raise
            if report is not None:
                report.attach()
            finished = self._running[tree] = loop.create_future()
            output.wake = tree.wake
            try:
                exit_, timed_out = await self._supervise(command, on_start, tree, output)
                usage = report.usage(exit_.usage, tree.start.at_s) if report else exit_.usage
            finally:
                del self._running[tree]
                finished.set_result(None)
        if tree.interrupted:
            raise asyncio.CancelledError
        if output.error is not None:
            raise output.error
        return Completion(
            exit_code=exit_.exit_code,
            signal=exit_.signal,
            timed_out=timed_out,
            usage=usage,
            stdout_bytes=output.stdout.produced_bytes,
            stderr_bytes=output.stderr.produced_bytes,
        )

    def kill_all(self) -> None:
        for tree in list(self._running):
            tree.kill()

    async def close(self) -> None:
        """Kill all running commands and wait for their end."""
        if self._running:
            self.kill_all()
            await asyncio.wait(list(self._running.values()))
        self.slots.close()

    async def _supervise(
        self, command: Command, on_start: OnStart, tree: ProcessTree, output: "_Output"
    ) -> tuple[Exit, bool]:
        """Wait for the process, or end it on timeout or error. Afterwards the whole tree is gone."""
        loop = asyncio.get_running_loop()
        try:
            on_start(f"{tree.pid}:{tree.start_ticks}")
            for pump in output.pumps:
                pump.attach(loop)
            await tree.wait(command.timeout_s)
        except BaseException:
            await tree.end(self._grace_s)
            with suppress(StorageError):
                output.finish()
            tree.reap()
            raise
        timed_out = tree.is_alive and output.error is None
        if tree.is_alive:
            await tree.end(self._grace_s if timed_out else 0.0)
        elif new_pids(tree.start)[1] != ():
            # Also after a successful exit: a daemon left behind would disturb the next measurement.
            await tree.kill_descendants()
        exit_ = tree.reap()
        output.finish()
        return exit_, timed_out


class _Output:
    """Both output streams of a command, and the first error while writing them."""

    def __init__(self, command: Command, limit_bytes: int, stack: ExitStack) -> None:
        self.error: StorageError | None = None
        self.wake: Callable[[], None] = lambda: None
        self.stdout = CappedFile(str(command.stdout), limit_bytes)
        self.stderr = CappedFile(str(command.stderr), limit_bytes)
        self.pumps: list[Pump] = []
        for file in (self.stdout, self.stderr):
            file.open()
            stack.callback(file.close)
            pump = Pump(self._on_error)
            stack.callback(pump.close)
            pump.sink = file
            self.pumps.append(pump)

    def finish(self) -> None:
        """Write what is left in the pipes. All writers are dead; a process that holds a pipe open is not awaited."""
        for pump in self.pumps:
            pump.drain()
        for file in (self.stdout, self.stderr):
            if self.error is None:
                file.finish()

    def _on_error(self, error: StorageError) -> None:
        self.error = self.error or error
        self.wake()


class CappedFile:
    """A file with the first `limit_bytes` of the output and its last 64 KiB. Opened by the first write, or `open`."""

    def __init__(self, path: str, limit_bytes: int) -> None:
        # A string: creating two Path objects per trial costs as much as calling a worker.
        self.path = path
        self.produced_bytes = 0
        self._free_bytes = self._limit_bytes = limit_bytes
        self._tail: bytearray | None = None
        self._fd = -1

    def open(self) -> None:
        """Create the file, so that it exists even if nothing is printed."""
        with storage(Path(self.path)):
            try:
                self._fd = os.open(self.path, _FLAGS, 0o666)
            except FileNotFoundError:
                Path(self.path).parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self.path, _FLAGS, 0o666)

    def open_if_missing(self) -> None:
        """Create the file unless it exists."""
        if self._fd < 0 and not Path(self.path).exists():
            self.open()

    def write(self, chunk: bytes) -> None:
        """Add output."""
        self.produced_bytes += len(chunk)
        if self._free_bytes:
            head = chunk[: self._free_bytes]
            self._put(head)
            self._free_bytes -= len(head)
            chunk = chunk[len(head) :]
        if chunk:
            if self._tail is None:
                self._tail = bytearray()
            self._tail += chunk
            if len(self._tail) > 2 * TAIL_BYTES:
                del self._tail[:-TAIL_BYTES]

    def finish(self) -> None:
        """Append the end of a long output, and close the file."""
        try:
            if self._tail:
                del self._tail[:-TAIL_BYTES]
                if omitted := self.produced_bytes - self._limit_bytes - len(self._tail):
                    self._put(b"\n[loopwright: %d bytes left out]\n" % omitted)
                self._put(self._tail)
        finally:
            self.close()

    def close(self) -> None:
        """Close the file as it is. Safe to call twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _put(self, data: bytes | bytearray) -> None:
        if self._fd < 0:
            self.open()
        with storage(Path(self.path)):
            count = os.write(self._fd, data)
            while count < len(data):
                count += os.write(self._fd, memoryview(data)[count:])


class Pump:
    """The reading end of a pipe, and the file its bytes are written to. `sink` may change at any time."""

    def __init__(self, on_error: Callable[[StorageError], None]) -> None:
        self.sink: CappedFile | None = None
        self._on_error = on_error
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Copy output as it arrives. From now on only the process has the writing end."""
        self.detach()
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1
        self._loop = loop
        loop.add_reader(self._read_fd, self.drain, 1)  # one chunk, so that other trials get their turn

    def detach(self) -> None:
        """Stop copying. Safe to call twice, and after the loop was closed."""
        if self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._read_fd)
            self._loop = None

    def drain(self, chunks: int = _DRAIN_CHUNKS) -> None:
        """Copy what is in the pipe. Bounded: another process may hold the pipe open and keep writing."""
        for _ in range(chunks):
            try:
                chunk = os.read(self._read_fd, _CHUNK_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                self.detach()
                return
            if self.sink is not None:
                try:
                    self.sink.write(chunk)
                except StorageError as error:
                    sink, self.sink = self.sink, None
                    with suppress(OSError):
                        sink.close()
                    self._on_error(error)

    def close(self) -> None:
        """Close the pipe."""
        self.detach()
        for descriptor in (self.write_fd, self._read_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self.write_fd = self._read_fd = -1
