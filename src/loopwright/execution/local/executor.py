"""Runs commands as local processes: event-driven, with capped output, and without leftovers.

Output is copied from a pipe to a file with a size cap, which keeps the beginning and the end and counts the middle.
Benchmarks print their result last, so the end of a long output is as valuable as its beginning.
"""

import asyncio
import errno
import os
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from loopwright.core.errors import LaunchError, StorageError, storage
from loopwright.execution.base import Command, Completion, Executor, OnStart, Slot
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
        pin_cpus: bool = False,
        memory_bytes: int | None = None,
        output_bytes: int = OUTPUT_BYTES,
        grace_s: float = GRACE_S,
        slots: "Slots | None" = None,
    ) -> None:
        self.slots: Slots = slots or Slots(parallel, pin_cpus=pin_cpus)
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


class Slots:
    """The slots of a run, granted in the order of the requests. No two trials have the same one at the same time.

    Each has its share of the cores and of the `devices`, and `ports` free ports. Not asyncio.Semaphore, which stays
    bound to the event loop in which it was first contended: each run has its own.
    """

    def __init__(
        self,
        count: int,
        *,
        pin_cpus: bool = False,
        devices: Sequence[str] = (),
        devices_each: int = 0,
        ports: int = 0,
    ) -> None:
        if count < 1:
            raise ValueError(f"parallel = {count}: must be at least 1")
        if devices_each * count > len(devices):
            raise ValueError(f"parallel = {count} with gpus = {devices_each} needs more than {len(devices)} devices")
        cores = sorted(os.sched_getaffinity(0))
        self._cores = core_sets(cores, count) if pin_cpus else [None] * count
        self._cpus = [",".join(map(str, sorted(pinned or cores))) for pinned in self._cores]
        self._devices = [
            ",".join(devices[number * devices_each : (number + 1) * devices_each]) for number in range(count)
        ]
        self._leases: list[list[PortLease]] = [[] for _ in range(count)]
        self._ports = ports
        self._free = deque(range(count))
        self._waiting: deque[asyncio.Future[int]] = deque()
        self._slots: list[Slot | None] = [None] * count

    async def acquire(self) -> Slot:
        """Wait for a free slot and take it."""
        if self._free:
            number = self._free.popleft()
        else:
            future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            try:
                number = await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():
                    self.release(Slot(future.result()))
                raise
        try:
            return self._slots[number] or self._slot(number)
        except BaseException:
            self.release(Slot(number))
            raise

    def release(self, slot: Slot) -> None:
        """Return a slot, which its number identifies; the longest waiting request gets it."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(slot.number)
                return
        # Last in, first out: the most recently used slot has a warm worker and warm caches.
        self._free.appendleft(slot.number)

    def close(self) -> None:
        """Release all ports."""
        for leases in self._leases:
            while leases:
                leases.pop().close()

    def with_free_ports(self, slot: Slot) -> Slot:
        """The same slot, with other ports if something else uses one of its ports by now."""
        leases = self._leases[slot.number]
        if all(lease.is_free for lease in leases):
            return slot
        self._slots[slot.number] = None
        while leases:
            leases.pop().close()
        return self._slot(slot.number)

    def _slot(self, number: int) -> Slot:
        leases = self._leases[number]
        while len(leases) < self._ports:
            leases.append(PortLease())
        values: dict[str, Any] = {"slot": number, "cpus": self._cpus[number]}
        values |= {"port" if n == 1 else f"port_{n}": lease.port for n, lease in enumerate(leases, 1)}
        if devices := self._devices[number]:
            values["gpu"] = devices
        variables = {f"LOOPWRIGHT_{name.upper()}": str(value) for name, value in values.items()}
        if devices:
            variables["ROCR_VISIBLE_DEVICES"] = devices
            if not os.path.exists("/dev/kfd"):  # noqa: PTH110  AMD's runtime would apply both, one after the other.
                variables["CUDA_VISIBLE_DEVICES"] = devices
        slot = self._slots[number] = Slot(number, self._cores[number], values, variables)
        return slot


class PortLease:
    """A free port. No other run of this machine gets it until it is closed, or this process ends."""

    # Below the ports that the kernel gives to outgoing connections.
    _FIRST, _COUNT = 20_000, 12_000

    def __init__(self) -> None:
        for offset in range(self._COUNT):
            self.port = self._FIRST + (os.getpid() * 37 + offset) % self._COUNT
            self._lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            with suppress(OSError):
                # An abstract name: it is unique on the machine, and gone with this process.
                self._lock.bind(f"\0loopwright-port-{self.port}")
                if self.is_free:
                    return
            self._lock.close()
        raise LaunchError(f"no port from {self._FIRST} to {self._FIRST + self._COUNT - 1} is free.", infra=True)

    @property
    def is_free(self) -> bool:
        """Whether a server could listen on it now."""
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                with socket.socket(family, socket.SOCK_STREAM) as probe:
                    if family is socket.AF_INET6:
                        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    probe.bind(("", self.port))
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):  # other errors: the kernel has no IPv6
                    return False
        return True

    def close(self) -> None:
        """Let others have the port."""
        self._lock.close()


def core_sets(cores: list[int], count: int) -> list[frozenset[int] | None]:
    """`count` sets of equal size, disjoint as long as there are enough cores."""
    size = max(1, len(cores) // count)
    return [frozenset(cores[(slot * size + i) % len(cores)] for i in range(size)) for slot in range(count)]


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
