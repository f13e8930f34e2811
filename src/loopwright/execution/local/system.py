"""The local system: trials are processes on this machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from loopwright.core.config import Size
from loopwright.core.errors import Problem
from loopwright.execution.devices import visible_devices
from loopwright.execution.local.executor import LocalExecutor, Slots
from loopwright.execution.local.worker_pool import WorkerPool
from loopwright.execution.system import SystemConfig


class LocalSystem(SystemConfig):
    """Processes on this machine."""

    type: Literal["local"] = "local"
    """`local`: processes on this machine."""
    pin_cpus: bool = False
    """Whether each trial in flight gets its own cores, so that parallel trials do not disturb one another."""
    gpus: Literal["auto"] | int | tuple[int | str, ...] = Field(default=(), union_mode="left_to_right")
    """The GPUs that trials share: how many, a list of their ids, or "auto" for all of this machine. Each trial in
    flight has `[run.workload] gpus` of them to itself, in `CUDA_VISIBLE_DEVICES` and `ROCR_VISIBLE_DEVICES`."""
    memory: Size | None = Field(default=None, gt=0)
    """How much memory each process of a trial may use, for example "2GiB"."""

    @field_validator("gpus")
    @classmethod
    def _different(cls, gpus: str | int | tuple[int | str, ...]) -> str | int | tuple[int | str, ...]:
        if isinstance(gpus, int) and not 0 <= gpus <= 1024:
            raise ValueError(f"{gpus} is not a number of GPUs")
        if isinstance(gpus, tuple) and len({str(gpu) for gpu in gpus}) < len(gpus):
            raise ValueError(f"{list(gpus)} names a GPU twice")
        return gpus

    def devices(self) -> tuple[str, ...]:
        """The ids of the GPUs."""
        if self.gpus == "auto":
            return visible_devices()
        return tuple(map(str, range(self.gpus) if isinstance(self.gpus, int) else self.gpus))

    def executor(self, directory: Path, gpus: int = 0, ports: int = 0) -> LocalExecutor:
        devices = self.devices() if gpus else ()
        slots = Slots(self.parallel, pin_cpus=self.pin_cpus, devices=devices, devices_each=gpus, ports=ports)
        return LocalExecutor(memory_bytes=self.memory, output_bytes=self.output, grace_s=self.grace_s, slots=slots)

    def call_executor(self, directory: Path, gpus: int = 0) -> WorkerPool:
        slots = self.executor(directory, gpus, ports=1).slots
        return WorkerPool(self.parallel, self.output, self.grace_s, self.memory, slots=slots)

    def problems(self, kind: str, nodes: Sequence[int] = (), gpus: int = 0) -> list[Problem]:
        problems = []
        if any(count > 1 for count in nodes):
            problems.append(Problem("nodes", 'more than one needs a cluster: [system] type = "slurm".'))
        if gpus and gpus * self.parallel > (count := len(self.devices())):
            needs = f"{gpus} for each of parallel = {self.parallel} trials, but [system] gpus has {count}"
            problems.append(Problem("gpus", f"needs {needs}. Lower one of them, or list more devices."))
        return problems
