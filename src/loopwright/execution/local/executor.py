"""Runs commands as local processes: event-driven, with capped output, and without leftovers."""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress

from loopwright.core.errors import StorageError
from loopwright.execution.base import Command, Completion, Executor, OnStart
from loopwright.execution.local.output import CappedFile, Pump
from loopwright.execution.local.process_tree import Exit, ProcessLimits, ProcessTree, exhaustion_as_launch_error, spawn
from loopwright.execution.local.processes import MARKER_VARIABLE

OUTPUT_BYTES = 64 * 1024 * 1024
GRACE_S = 2.0


class LocalExecutor(Executor):
    """Runs up to `parallel` commands at a time, each in its own session."""

    def __init__(
        self,
        parallel: int = 1,
        pin_cpus: bool = False,
        memory_bytes: int | None = None,
        output_bytes: int = OUTPUT_BYTES,
        grace_s: float = GRACE_S,
    ) -> None:
        self._slots = Slots(parallel, pin_cpus=pin_cpus)
        self._memory_bytes = memory_bytes
        self._output_bytes = output_bytes
        self._grace_s = grace_s
        self._running: dict[ProcessTree, asyncio.Future[None]] = {}

    async def run(self, command: Command, on_start: OnStart) -> Completion:
        loop = asyncio.get_running_loop()
        slot = await self._slots.acquire()
        with ExitStack() as stack:
            stack.callback(self._slots.release, slot)
            with exhaustion_as_launch_error():
                output = _Output(command, self._output_bytes, stack)
                process = spawn(
                    command.argv,
                    directory=command.directory,
                    environment={
                        **command.environment,
                        MARKER_VARIABLE: f"{command.environment.get(MARKER_VARIABLE, '')}:{command.marker}",
                    },
                    stdout=output.pumps[0].write_fd,
                    stderr=output.pumps[1].write_fd,
                    limits=ProcessLimits(self._slots.cores[slot], self._memory_bytes),
                )
            tree = ProcessTree(process, command.marker)
            finished = self._running[tree] = loop.create_future()
            output.wake = tree.wake
            try:
                exit_, timed_out = await self._supervise(command, on_start, tree, output)
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
            usage=exit_.usage,
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

    async def _supervise(
        self, command: Command, on_start: OnStart, tree: ProcessTree, output: "_Output"
    ) -> tuple[Exit, bool]:
        """Wait for the process, or end it on timeout or error. Afterwards the whole tree is gone."""
        loop = asyncio.get_running_loop()
        try:
            on_start(tree.pid, tree.start_ticks)
            for pump in output.pumps:
                pump.close_writer()
                pump.attach(loop)
            tree.attach(loop)
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
        elif not tree.is_alone():
            # Also after a successful exit: a daemon left behind would disturb the next measurement.
            await tree.kill_descendants()
        exit_ = tree.reap()
        output.finish()
        return exit_, timed_out


class Slots:
    """Numbered permits for running trials, granted in the order of the requests, with their CPU cores.

    Not asyncio.Semaphore, which stays bound to the event loop in which it was first contended: each run has its own.
    """

    def __init__(self, count: int, *, pin_cpus: bool = False) -> None:
        if count < 1:
            raise ValueError(f"parallel = {count}: must be at least 1")
        self._free = deque(range(count))
        self._waiting: deque[asyncio.Future[int]] = deque()
        self.cores = core_sets(sorted(os.sched_getaffinity(0)), count) if pin_cpus else [None] * count
        """The cores of each slot; None if trials are not pinned."""

    async def acquire(self) -> int:
        """Wait for a free slot and take it."""
        if self._free:
            return self._free.popleft()
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(future.result())
            raise

    def release(self, slot: int) -> None:
        """Return a slot; the longest waiting request gets it."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(slot)
                return
        # Last in, first out: the most recently used slot has a warm worker and warm caches.
        self._free.appendleft(slot)


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
