"""Python callables in worker processes that stay warm from call to call, and that can be killed."""

import asyncio

from loopwright.execution.base import OnStart
from loopwright.execution.local.call import CallResult, FunctionCall
from loopwright.execution.local.executor import GRACE_S, OUTPUT_BYTES
from loopwright.execution.local.spawn import ProcessLimits
from loopwright.execution.local.worker_process import WorkerProcess
from loopwright.execution.slots import Slots

_IDLE_PER_SLOT = 4


class WorkerPool:
    """Up to `size` calls at a time. A worker that timed out, died or left something running is replaced."""

    def __init__(
        self,
        size: int,
        output_bytes: int = OUTPUT_BYTES,
        grace_s: float = GRACE_S,
        memory_bytes: int | None = None,
        pin_cpus: bool = False,
    ) -> None:
        self._slots = Slots(size, pin_cpus=pin_cpus)
        self._most_idle = _IDLE_PER_SLOT * size
        self._output_bytes = output_bytes
        self._grace_s = grace_s
        self._limits = [ProcessLimits(self._slots.cores(slot), memory_bytes) for slot in range(size)]
        self._idle: list[WorkerProcess] = []
        self._busy: set[WorkerProcess] = set()
        self._quiet: asyncio.Future[None] | None = None

    async def call(self, call: FunctionCall, on_start: OnStart) -> CallResult:
        """Make the call. Raise LaunchError if no worker can be started, StorageError if a file cannot be written."""
        slot = await self._slots.take()
        try:
            worker = await self._hire(call, self._limits[slot])
            self._busy.add(worker)
            try:
                return await worker.call(call, self._output_bytes, on_start)
            finally:
                self._busy.remove(worker)
                if worker.usable:
                    self._idle.append(worker)
                if self._quiet is not None and not self._busy:
                    self._quiet.set_result(None)
                    self._quiet = None
        finally:
            self._slots.give(slot)

    def kill_all(self) -> None:
        """SIGKILL every worker and what it on_start, at once; callable from a signal handler."""
        for worker in [*self._busy, *self._idle]:
            worker.kill()

    async def close(self) -> None:
        """End all workers: busy ones are killed, idle ones may run their exit handlers."""
        for worker in list(self._busy):
            worker.kill()
        if self._busy:
            self._quiet = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._quiet)
        idle, self._idle = self._idle, []
        await asyncio.gather(*(worker.dismiss() for worker in idle))

    async def _hire(self, call: FunctionCall, limits: ProcessLimits) -> WorkerProcess:
        """An idle worker with the same environment (OMP_NUM_THREADS and its like are read at import), or a new one."""
        for worker in reversed(self._idle):
            if worker.fits(call, limits):
                self._idle.remove(worker)
                if not worker.ended:
                    return worker
                await worker.dismiss()
                break
        while len(self._idle) >= self._most_idle:
            await self._idle.pop(0).dismiss()
        return WorkerProcess(call, limits, self._grace_s)
