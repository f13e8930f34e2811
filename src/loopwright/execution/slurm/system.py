"""The Slurm system: trials are jobs of a cluster, or steps of one allocation."""

from collections.abc import Sequence
from pathlib import Path

from loopwright.core.errors import Problem
from loopwright.execution.call_commands import CallCommands
from loopwright.execution.slurm.allocation import AllocationExecutor
from loopwright.execution.slurm.executor import SlurmExecutor
from loopwright.execution.slurm.options import SlurmOptions


class SlurmSystem(SlurmOptions):
    """Jobs of a Slurm cluster. Compute nodes must see the output directory and this Python under the same paths."""

    def executor(self, directory: Path, gpus: int = 0, ports: int = 0) -> SlurmExecutor:
        kind = AllocationExecutor if self.mode == "allocation" else SlurmExecutor
        return kind(self, directory)

    def call_executor(self, directory: Path, gpus: int = 0) -> CallCommands:
        return CallCommands(self.executor(directory), self.python)

    def adopts(self, handle: str) -> bool:
        return handle.startswith("slurm:")

    def problems(self, kind: str, nodes: Sequence[int] = (), gpus: int = 0) -> list[Problem]:
        if self.mode != "allocation":
            return []
        if kind == "live":
            return [Problem("[system] mode", '"allocation" cannot run a live environment; use mode = "per_trial".')]
        problems = []
        if any(count > self.nodes for count in nodes):
            text = f"{max(nodes)} is more than the allocation has: [system] nodes = {self.nodes}."
            problems.append(Problem("nodes", text))
        if gpus > (self.gpus or 0):
            text = f"{gpus} per trial is more than the allocation has: [system] gpus = {self.gpus or 0}."
            problems.append(Problem("gpus", text))
        elif gpus and self.launcher == "direct" and self.parallel > 1:
            text = '"direct" gives the trials of an allocation no GPUs of their own; use "srun", or parallel = 1.'
            problems.append(Problem("[system] launcher", text))
        return problems
