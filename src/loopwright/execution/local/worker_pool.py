"""Calls Python functions in worker processes that stay warm between calls and can be killed."""

import asyncio
from collections.abc import Mapping

from loopwright.execution.base import CallExecutor, CallResult, FunctionCall, OnStart, Slot
from loopwright.execution.local.executor import GRACE_S, OUTPUT_BYTES, Slots
from loopwright.execution.local.process_tree import ProcessLimits
from loopwright.execution.local.worker_process import WorkerProcess

_IDLE_PER_SLOT = 4


class WorkerPool(CallExecutor):
    """Makes up to `size` calls at a time. A worker that timed out, died or left a process running is replaced."""

    def __init__(
        self,
        size: int,
        output_bytes: int = OUTPUT_BYTES,
        grace_s: float = GRACE_S,
        memory_bytes: int | None = None,
        pin_cpus: bool = False,
        slots: Slots | None = None,
    ) -> None:
        self._slots = slots or Slots(size, pin_cpus=pin_cpus)
        self._max_idle = _IDLE_PER_SLOT * size
        self._output_bytes = output_bytes
        self._grace_s = grace_s
        self._memory_bytes = memory_bytes
        self._places: dict[int, tuple[Slot, Mapping[str, str], Mapping[str, str], ProcessLimits]] = {}
        """By slot: what its last call had, the environment of its workers, and their limits."""
        self._idle: list[WorkerProcess] = []
        self._busy: set[WorkerProcess] = set()
        self._all_idle: asyncio.Future[None] | None = None

    async def call(self, call: FunctionCall, on_start: OnStart) -> CallResult:
        slot = await self._slots.acquire()
        try:
            worker = await self._worker_for(call, *self._place(call, slot))
            self._busy.add(worker)
            try:
                return await worker.call(call, self._output_bytes, on_start)
            finally:
                self._busy.remove(worker)
                if worker.usable:
                    self._idle.append(worker)
                if self._all_idle is not None and not self._busy:
                    self._all_idle.set_result(None)
                    self._all_idle = None
        finally:
            self._slots.release(slot)

    def kill_all(self) -> None:
        for worker in [*self._busy, *self._idle]:
            worker.kill()

    async def close(self) -> None:
        """End all workers: busy ones are killed, idle ones may run their exit handlers."""
        for worker in list(self._busy):
            worker.kill()
        if self._busy:
            self._all_idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._all_idle)
        idle, self._idle = self._idle, []
        await asyncio.gather(*(worker.close() for worker in idle))
        self._slots.close()

    def _place(self, call: FunctionCall, slot: Slot) -> tuple[Mapping[str, str], ProcessLimits]:
        """The environment and the limits of a call in its slot; the same objects if possible: workers compare them."""
        place = self._places.get(slot.number)
        if place is None or place[0] is not slot or place[1] is not call.environment:
            environment = {**call.environment, **slot.variables}
            limits = ProcessLimits(slot.cores, self._memory_bytes)
            place = self._places[slot.number] = slot, call.environment, environment, limits
        return place[2], place[3]

    async def _worker_for(
        self, call: FunctionCall, environment: Mapping[str, str], limits: ProcessLimits
    ) -> WorkerProcess:
        """An idle worker with the same environment (OMP_NUM_THREADS and others are read at import), or a new one."""
        for worker in reversed(self._idle):
            if worker.fits(environment, call.path, limits):
                self._idle.remove(worker)
                if worker.is_alive:
                    return worker
                await worker.close()
                break
        while len(self._idle) >= self._max_idle:
            await self._idle.pop(0).close()
        return WorkerProcess(call, environment, limits, self._grace_s)
