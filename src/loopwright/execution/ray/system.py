"""The Ray system: trials run on the nodes of a Ray cluster."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from loopwright.core.errors import MissingExtra, Problem
from loopwright.execution.ray.options import RayOptions

if TYPE_CHECKING:
    from loopwright.execution.ray.executor import RayExecutor


class RaySystem(RayOptions):
    """The nodes of a Ray cluster, which need Loopwright in their Python. They need not share a file system."""

    def executor(self, directory: Path, gpus: int = 0, ports: int = 0) -> "RayExecutor":
        if find_spec("ray") is None:
            raise MissingExtra('[system] type = "ray"', "ray")
        from loopwright.execution.ray.executor import RayExecutor

        return RayExecutor(self, directory, gpus)

    def call_executor(self, directory: Path, gpus: int = 0) -> "RayExecutor":
        return self.executor(directory, gpus)

    def session(self) -> AbstractContextManager[None]:
        if find_spec("ray") is None:
            return nullcontext()
        from loopwright.execution.ray.connection import RayConnection

        return RayConnection.lingering()

    def problems(self, kind: str, nodes: Sequence[int] = (), gpus: int = 0) -> list[Problem]:
        problems = []
        if any(count > 1 for count in nodes):
            problems.append(Problem("nodes", 'a trial on Ray takes one node; for more use [system] type = "slurm".'))
        if find_spec("ray") is None:
            problems.append(Problem("[system] type", str(MissingExtra("ray", "ray"))))
        for key in ("working_dir", "py_modules"):
            paths = self.runtime_env.get(key, ())
            local = [path for path in ([paths] if isinstance(paths, str) else paths) if "://" not in path]
            missing = [path for path in local if not Path(path).exists()]
            problems += [Problem(f"[system] runtime_env.{key}", f"there is no {path}.") for path in missing]
        return problems

    def unreachable(self, gpus: int = 0) -> list[Problem]:
        if find_spec("ray") is None or not self.named_address:
            return []
        from loopwright.execution.ray.connection import find_problem

        problem = find_problem(self, self.request(gpus))
        return [problem] if problem is not None else []
