"""One worker process as its parent sees it: a socket for the calls, two pipes for the output, and an end."""

import asyncio
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

from loopwright.core.errors import StorageError, storage
from loopwright.execution.base import OnStart, Usage
from loopwright.execution.local import spawn as births
from loopwright.execution.local.call import CallResult, FunctionCall
from loopwright.execution.local.connection import Frame, FrameSocket
from loopwright.execution.local.output import CappedFile, Pump
from loopwright.execution.local.process_tree import Exit, ProcessTree, describe
from loopwright.execution.local.processes import MARKER_VARIABLE
from loopwright.execution.local.spawn import ProcessLimits, room, spawn

# As a file and not by -m, which would import the package around it; -P keeps its folder off sys.path.
COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("worker_main.py")))
_IMPORT_S = 60.0


class WorkerProcess:
    """A worker, good for one call at a time, and for another one while it is `usable`."""

    def __init__(self, call: FunctionCall, limits: ProcessLimits, grace_s: float) -> None:
        self.usable = False
        self._environment, self._path, self._limits = call.environment, call.path, limits
        self._grace_s = grace_s
        # Recognised by a mark of its own, since the trial's changes from call to call.
        self._mark = f"worker-{uuid.uuid4().hex}"
        self._inherited = call.environment.get(MARKER_VARIABLE, "")
        self._imported: set[str] = set()
        self._answer: Frame | None = None
        self._ready = self._hung_up = False
        self._failure: StorageError | None = None
        self._exit: Exit | None = None
        self._spent_s = 0.0, 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._files: tuple[CappedFile, ...] = ()
        with room():
            self._connection = FrameSocket(self._on_frame)
            self._pumps: list[Pump] = []
            try:
                for _ in ("stdout", "stderr"):
                    self._pumps.append(Pump(self._on_failure))
                self._tree = self._spawn(call.marker)
            except BaseException:
                self._close()
                raise
        self._seen = births.now()
        self._connection.send({"path": [str(entry) for entry in call.path]})

    @property
    def ended(self) -> bool:
        """Whether the process is gone, or will not answer any more."""
        return self._tree.ended or self._hung_up

    def fits(self, call: FunctionCall, limits: ProcessLimits) -> bool:
        """Whether this call may be made here."""
        # Identity first: comparing an environment and paths costs a tenth of a call, and they are the same each time.
        return (
            (self._environment is call.environment or self._environment == call.environment)
            and (self._path is call.path or self._path == call.path)
            and (self._limits is limits or self._limits == limits)
        )

    async def call(self, call: FunctionCall, output_bytes: int, on_start: OnStart) -> CallResult:
        """Make a call. Unless it is answered in good order, the worker is gone afterwards."""
        self._attach(asyncio.get_running_loop())
        self._answer, self._ready, self.usable = None, False, False
        directory = str(call.directory)
        self._files = CappedFile(f"{directory}/stdout", output_bytes), CappedFile(f"{directory}/stderr", output_bytes)
        for pump, file in zip(self._pumps, self._files, strict=True):
            pump.sink = file
        start_s = time.monotonic()
        try:
            on_start(self._tree.pid, self._tree.start_ticks)
            self._connection.send(self._frame(call))
            await self._wait(call)
            returned = await self._conclude(call, time.monotonic() - start_s)
        except BaseException:
            await self._end(self._grace_s)
            with suppress(StorageError):
                self._finish_files()
            raise
        if self._tree.interrupted:
            raise asyncio.CancelledError
        return returned

    def kill(self) -> None:
        """SIGKILL the worker and all that it on_start, without waiting."""
        if self._exit is None:
            self._tree.kill()

    async def dismiss(self) -> None:
        """Hang up on an idle worker, which ends it, and let go of it."""
        self._attach(asyncio.get_running_loop())
        self._connection.close()
        await self._tree.dismiss(self._grace_s)
        await self._end(0.0)
        if self._tree.interrupted:
            raise asyncio.CancelledError

    async def _wait(self, call: FunctionCall) -> None:
        """Wait for the answer, the worker's end, a full disk, or the timeout."""
        if call.function not in self._imported:
            await self._tree.wait(max(call.timeout_s, _IMPORT_S) if call.timeout_s is not None else None)
            if self._ready:
                self._imported.add(call.function)
            if not self._ready or self._settled:
                return
        await self._tree.wait(call.timeout_s)

    @property
    def _settled(self) -> bool:
        return self.ended or self._answer is not None or self._failure is not None

    async def _conclude(self, call: FunctionCall, wall_s: float) -> CallResult:
        answer = self._answer
        if answer is not None and answer["output"]:
            for pump in self._pumps:
                pump.drain()
        if self._failure is not None:
            await self._end(0.0)
            raise self._failure
        if answer is None:
            return await self._give_up(wall_s)
        self._finish_files()
        if "storage" in answer:
            number, reason = answer["storage"]
            with storage(call.directory):
                raise OSError(number, reason)
        present = births.now()
        # Whatever it left running would disturb the next measurement, and dies with it.
        self.usable = answer["usable"] and not self._tree.leftovers(self._seen, present)
        self._seen = present
        if not self.usable:
            await self._end(0.0)
        usage = Usage(*answer["usage"])
        self._spent_s = self._spent_s[0] + usage.user_s, self._spent_s[1] + usage.system_s
        value: dict[str, int | float] | None = answer.get("value")
        if value is not None and (others := answer["others"]):
            value |= {name: float(text) for name, text in others.items()}
        return self._returned(usage, value=value, error=answer.get("error"))

    async def _give_up(self, wall_s: float) -> CallResult:
        timed_out = not self.ended
        if self._hung_up:
            # The socket closes a moment before the process is gone; one that lives on without it has to go too.
            await self._tree.dismiss(self._grace_s)
        exit_ = await self._end(self._grace_s if timed_out else 0.0)
        if self._failure is not None:
            raise self._failure
        for file in self._files:
            file.ensure()
        self._finish_files()
        used = exit_.usage
        usage = Usage(
            wall_s,
            max(0.0, used.user_s - self._spent_s[0]),
            max(0.0, used.system_s - self._spent_s[1]),
        )
        return self._returned(usage, timed_out=timed_out, died=None if timed_out else describe(exit_))

    def _returned(
        self,
        usage: Usage,
        *,
        value: dict[str, int | float] | None = None,
        error: str | None = None,
        timed_out: bool = False,
        died: str | None = None,
    ) -> CallResult:
        stdout, stderr = self._files
        return CallResult(usage, stdout.produced_bytes, stderr.produced_bytes, value, error, timed_out, died)

    def _finish_files(self) -> None:
        for pump, file in zip(self._pumps, self._files, strict=True):
            pump.sink = None
            if file.produced_bytes:
                file.finish()
            else:
                file.close()

    async def _end(self, grace_s: float) -> Exit:
        """End the worker and all that it on_start, and let go of it. Safe to call twice."""
        self.usable = False
        if self._exit is None:
            await self._tree.end(grace_s)
            for pump in self._pumps:
                pump.drain()
            try:
                self._exit = self._tree.reap()
            finally:
                self._close()
        return self._exit

    def _close(self) -> None:
        self._connection.close()
        for pump in self._pumps:
            pump.close()

    def _spawn(self, marker: str) -> ProcessTree:
        child = self._connection.child.fileno()
        spawned = spawn(
            [*COMMAND, str(child)],
            directory=Path("/"),
            environment={**self._environment, MARKER_VARIABLE: self._variable(marker)},
            stdout=self._pumps[0].write_fd,
            stderr=self._pumps[1].write_fd,
            limits=self._limits,
            pass_fds=[child],
        )
        self._connection.child.close()
        for pump in self._pumps:
            pump.close_writer()
        return ProcessTree(spawned, self._mark)

    def _variable(self, marker: str) -> str:
        return f"{self._inherited}:{marker}:{self._mark}"

    def _frame(self, call: FunctionCall) -> Frame:
        return {
            "function": call.function,
            "arguments": call.arguments,
            "directory": str(call.directory),
            "parameters": call.parameters.decode(),
            "variable": self._variable(call.marker),
        }

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not loop:
            self._loop = loop
            self._tree.attach(loop)
            self._connection.attach(loop)
            for pump in self._pumps:
                pump.attach(loop)

    def _on_frame(self, frame: Frame | None) -> None:
        if frame is None:
            self._hung_up = True
        elif "ready" in frame:
            self._ready = True
        else:
            self._answer = frame
        self._tree.wake()

    def _on_failure(self, error: StorageError) -> None:
        self._failure = self._failure or error
        self._tree.wake()
