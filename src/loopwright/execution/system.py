"""The system of a scenario: where its trials run and what they may use. Each `type` has its own config class."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field

from loopwright.core.config import Config, Size
from loopwright.core.errors import Problem
from loopwright.core.registry import Registry
from loopwright.execution.base import CallExecutor, Executor


class SystemConfig(Config):
    """Settings of every system.

    class Batch(SystemConfig):
        type: Literal["batch"] = "batch"

        def executor(self, directory: Path, gpus: int = 0, ports: int = 0) -> Executor: ...
        def call_executor(self, directory: Path, gpus: int = 0) -> CallExecutor: ...
    """

    type: str
    parallel: int = Field(default=1, ge=1, le=4096)
    """How many trials are in flight at a time."""
    retries: int = Field(default=0, ge=0)
    """How often a trial that was lost to the infrastructure is attempted again under its number."""
    output: Size = Field(default=64 * 2**20, ge=4096)
    """How much of each output stream of a trial is kept, for example "64MiB"; the end is always kept."""
    grace_s: float = Field(default=2.0, ge=0)
    """Seconds between SIGTERM and SIGKILL when a process has to end."""
    durability: Literal["normal", "full"] = "normal"
    """`normal` survives a crash of the process; `full` also of the machine, at the cost of a disk flush per step."""
    shared_cache: str | None = None
    """The file of `cache = "shared"`, relative to the scenario; by default one in the output directory."""

    session: ClassVar[Callable[..., AbstractContextManager[None]]] = nullcontext
    """Surrounds all runs of a scenario, so that they may share connections."""

    @abstractmethod
    def executor(self, directory: Path, gpus: int = 0, ports: int = 0) -> Executor:
        """What runs the commands of a run, whose directory this is; each needs this many GPUs and ports."""

    @abstractmethod
    def call_executor(self, directory: Path, gpus: int = 0) -> CallExecutor:
        """What runs the Python functions of a run."""

    def resolved(self, directory: Path) -> Self:
        """The same, with paths that are relative to the scenario's directory made absolute."""
        return self

    def adopts(self, handle: str) -> bool:
        """Whether a resumed run can continue with the job of this handle."""
        return False

    def problems(self, kind: str, nodes: Sequence[int] = (), gpus: int = 0) -> list[Problem]:
        """Why this system cannot run such a run, whose trials take this many nodes and GPUs."""
        return []

    def unreachable(self, gpus: int = 0) -> list[Problem]:
        """Why no trial that takes this many GPUs could run now; asked by `loopwright verify`."""
        return []


systems: Registry[type[SystemConfig]] = Registry("system", "loopwright.systems", SystemConfig)
systems.add_lazily("local", "loopwright.execution.local.system:LocalSystem")
systems.add_lazily("slurm", "loopwright.execution.slurm.system:SlurmSystem")
systems.add_lazily("ray", "loopwright.execution.ray.system:RaySystem")
