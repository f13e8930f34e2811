"""Commands as processes of this machine: event-driven, capped, and gone without a trace when they are over."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, suppress

from loopwright.core.errors import StorageError
from loopwright.execution.base import Command, Completion, Executor, OnStart
from loopwright.execution.local.output import CappedFile, Pump
from loopwright.execution.local.process_tree import Exit, ProcessTree
from loopwright.execution.local.processes import MARKER_VARIABLE
from loopwright.execution.local.spawn import ProcessLimits, room, spawn
from loopwright.execution.slots import Slots

OUTPUT_BYTES = 64 * 1024 * 1024
GRACE_S = 2.0


class LocalExecutor(Executor):
    """Runs up to `parallel` commands at a time, each in a session of its own."""

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
        self._flying: dict[ProcessTree, asyncio.Future[None]] = {}

    async def run(self, command: Command, on_start: OnStart) -> Completion:
        """Run `command` to its end; see `Executor.run`."""
        slot = await self._slots.take()
        try:
            return await self._run(command, on_start, ProcessLimits(self._slots.cores(slot), self._memory_bytes))
        finally:
            self._slots.give(slot)

    def kill_all(self) -> None:
        """SIGKILL every tree in flight, at once."""
        for tree in list(self._flying):
            tree.kill()

    async def close(self) -> None:
        """End what is in flight, and wait for it."""
        self.kill_all()
        if self._flying:
            await asyncio.wait(list(self._flying.values()))

    async def _run(self, command: Command, on_start: OnStart, limits: ProcessLimits) -> Completion:
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            with room():
                output = _Output(command, self._output_bytes, stack)
                tree = self._spawn(command, output, limits)
            over = self._flying[tree] = loop.create_future()
            output.wake = tree.wake
            try:
                exit_, timed_out = await self._supervise(command, on_start, tree, output)
            finally:
                del self._flying[tree]
                over.set_result(None)
        if tree.interrupted:
            raise asyncio.CancelledError
        if output.failure is not None:
            raise output.failure
        return Completion(
            exit_code=exit_.exit_code,
            signal=exit_.signal,
            timed_out=timed_out,
            usage=exit_.usage,
            stdout_bytes=output.stdout.produced_bytes,
            stderr_bytes=output.stderr.produced_bytes,
        )

    def _spawn(self, command: Command, output: "_Output", limits: ProcessLimits) -> ProcessTree:
        inherited = command.environment.get(MARKER_VARIABLE, "")
        spawned = spawn(
            command.argv,
            directory=command.directory,
            environment={**command.environment, MARKER_VARIABLE: f"{inherited}:{command.marker}"},
            stdout=output.pumps[0].write_fd,
            stderr=output.pumps[1].write_fd,
            limits=limits,
        )
        return ProcessTree(spawned, command.marker)

    async def _supervise(
        self, command: Command, on_start: OnStart, tree: ProcessTree, output: "_Output"
    ) -> tuple[Exit, bool]:
        """Follow the process to its end, or put an end to it; either way all of it is gone afterwards."""
        loop = asyncio.get_running_loop()
        try:
            on_start(tree.pid, tree.start_ticks)
            output.attach(loop)
            tree.attach(loop)
            await tree.wait(command.timeout_s)
        except BaseException:
            await tree.end(self._grace_s)
            with suppress(StorageError):
                output.finish()
            tree.reap()
            raise
        timed_out = not tree.ended and output.failure is None
        if not tree.ended:
            await tree.end(self._grace_s if timed_out else 0.0)
        elif not tree.alone():
            # Also after a good end: a daemon left behind would disturb the next measurement.
            await tree.sweep()
        exit_ = tree.reap()
        output.finish()
        return exit_, timed_out


class _Output:
    """The two streams of a command, and the first failure to write them down."""

    def __init__(self, command: Command, limit_bytes: int, stack: ExitStack) -> None:
        self.failure: StorageError | None = None
        self.wake: Callable[[], None] = lambda: None
        self.stdout = CappedFile(str(command.stdout), limit_bytes)
        self.stderr = CappedFile(str(command.stderr), limit_bytes)
        self.pumps: list[Pump] = []
        for file in (self.stdout, self.stderr):
            file.open()
            stack.callback(file.close)
            pump = Pump(self._failed)
            stack.callback(pump.close)
            pump.sink = file
            self.pumps.append(pump)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        for pump in self.pumps:
            pump.close_writer()
            pump.attach(loop)

    def finish(self) -> None:
        """Take what is still in the pipes. The writers are dead; whoever holds a pipe open is not waited for."""
        for pump in self.pumps:
            pump.drain()
        for file in (self.stdout, self.stderr):
            if self.failure is None:
                file.finish()

    def _failed(self, error: StorageError) -> None:
        self.failure = self.failure or error
        self.wake()
