"""The Slurm executor: the contract of all executors, on a real cluster."""

import pytest

from loopwright.execution import Executor
from loopwright.execution.slurm.system import SlurmSystem
from loopwright.testing import ExecutorContract

pytestmark = pytest.mark.slow


class TestSlurmExecutor(ExecutorContract):
    """Contract C01."""

    @pytest.fixture(autouse=True)
    def _place(self, slurm, tmp_path):
        self.directory = tmp_path / "run"

    def make_executor(self, parallel: int = 2, output_bytes: int = 1 << 20) -> Executor:
        system = SlurmSystem(parallel=parallel, output=max(4096, output_bytes), grace_s=0.2, poll_s=1)
        return system.model_copy(update={"output": output_bytes}).executor(self.directory)


class TestAllocationExecutor(TestSlurmExecutor):
    """Contract C01, as steps of an allocation."""

    def make_executor(self, parallel: int = 2, output_bytes: int = 1 << 20) -> Executor:
        system = SlurmSystem(parallel=parallel, grace_s=0.2, poll_s=1, mode="allocation", launcher="direct")
        return system.model_copy(update={"output": output_bytes}).executor(self.directory)
