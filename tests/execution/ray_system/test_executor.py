"""The Ray executor: the contract of all executors, in actors of a real cluster."""

import pytest
from ray._private.state import actors

from loopwright.execution import Executor
from loopwright.execution.ray.system import RaySystem
from loopwright.ledger.ledger import Ledger
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.load import load
from loopwright.testing import ExecutorContract
from tests.rollouts.pools.ray_cluster import cluster

__all__ = ["cluster"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


def test_runs_of_a_scenario_share_their_actors_and_leave_none(tmp_path):
    """Given two runs, the second uses the actors of the first; afterwards nothing holds resources."""
    (tmp_path / "mine.py").write_text("import os\ndef where(n):\n    return {'host': os.getppid()}\n")
    workload = {"type": "python", "function": "mine:where", "args": {"n": [1, 2, 3, 4]}}
    reward = {"type": "identity", "metrics": ["host"]}
    runs = [
        {"name": name, "agent": {"type": "grid"}, "reward": reward, "workload": workload} for name in ("one", "two")
    ]
    system = {"type": "ray", "parallel": 2, "cpus": 0.1}
    loaded = load({"name": "x", "home": str(tmp_path), "system": system, "run": runs})

    assert dispatch(loaded, tmp_path / "out") == 0

    hosts = []
    for name in ("one", "two"):
        with Ledger.read(tmp_path / "out" / name / "ledger.db") as ledger:
            hosts.append({trial.metrics["host"] for trial in ledger.trials()})
    assert hosts[1] <= hosts[0]
    assert [actor for actor in actors().values() if actor["State"] == "ALIVE"] == []


class TestRayExecutor(ExecutorContract):
    """Contract C01."""

    files = "auto"

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.directory = tmp_path / "run"

    def make_executor(self, parallel: int = 2, output_bytes: int = 1 << 20) -> Executor:
        system = RaySystem(parallel=parallel, cpus=0.1, grace_s=0.2, files=self.files)
        return system.model_copy(update={"output": output_bytes}).executor(self.directory)
