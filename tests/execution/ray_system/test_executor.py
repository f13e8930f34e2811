"""The Ray executor: the contract of all executors, in actors of a real cluster."""

import pytest

from loopwright.execution import Executor
from loopwright.execution.ray.system import RaySystem
from loopwright.testing import ExecutorContract
from tests.rollouts.pools.ray_cluster import cluster

__all__ = ["cluster"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


class TestRayExecutor(ExecutorContract):
    """Contract C01."""

    files = "auto"

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.directory = tmp_path / "run"

    def make_executor(self, parallel: int = 2, output_bytes: int = 1 << 20) -> Executor:
        system = RaySystem(parallel=parallel, cpus=0.1, grace_s=0.2, files=self.files)
        return system.model_copy(update={"output": output_bytes}).executor(self.directory)
