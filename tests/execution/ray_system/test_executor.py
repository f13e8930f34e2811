"""The Ray executor: the contract of all executors, on a real cluster."""

import asyncio
import os
import signal
import time

import pytest
import ray

from loopwright.core.errors import ClusterError, LaunchError
from loopwright.execution import Executor
from loopwright.execution.ray.channel import Listener
from loopwright.execution.ray.system import RaySystem
from loopwright.ledger.ledger import Ledger
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.load import load
from loopwright.testing import ExecutorContract
from loopwright.testing.executors import appears, command, ignore, written_pid
from tests.rollouts.pools.ray_cluster import cluster

__all__ = ["cluster"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


def wait_until_free(seconds=20.0):
    """Wait until nothing holds resources of the cluster."""
    deadline_s = time.monotonic() + seconds
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < deadline_s, ray.available_resources()
        time.sleep(0.1)


def test_runs_of_a_scenario_share_their_processes_and_leave_none_busy(tmp_path):
    """Given two runs, the second uses the processes of the first; afterwards nothing holds resources."""
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
    assert hosts[1] & hosts[0]
    wait_until_free()


def test_c03_a_trial_that_loses_its_host_says_so_and_the_next_one_gets_another(tmp_path):
    """Given a host that is killed in a trial, and one that is killed while idle, only the first costs an attempt."""

    async def main():
        executor = RaySystem(parallel=1, cpus=0.1, grace_s=0.2).executor(tmp_path / "run")
        try:
            lost = asyncio.ensure_future(executor.run(command(tmp_path, "echo $PPID > host; sleep 60"), ignore))
            await appears(tmp_path / "host")
            os.kill(written_pid(tmp_path / "host"), signal.SIGKILL)
            with pytest.raises(LaunchError, match=r"the trial was lost with its host on [\d.]+: .+") as caught:
                await lost
            assert caught.value.infra
            assert (await executor.run(command(tmp_path, "echo $PPID > idle"), ignore)).exit_code == 0
            os.kill(written_pid(tmp_path / "idle"), signal.SIGKILL)
            await asyncio.sleep(0.5)
            assert (await executor.run(command(tmp_path, "true"), ignore)).exit_code == 0
        finally:
            await executor.close()

    asyncio.run(main())
    wait_until_free()


def test_c01_nodes_that_cannot_reach_the_driver_are_named_at_once(tmp_path, monkeypatch):
    """Given a port of the driver that is closed for the nodes, the run ends with the address to open."""

    class Unreachable(Listener):
        def __init__(self, host, artifact_bytes):
            super().__init__(host, artifact_bytes)
            self.address = host, 1

    async def main():
        executor = RaySystem(parallel=1, cpus=0.1).executor(tmp_path / "run")
        try:
            with pytest.raises(ClusterError, match=r"no trial can run on this Ray cluster: .* cannot connect .*:1: "):
                await executor.run(command(tmp_path, "true"), ignore)
        finally:
            await executor.close()

    monkeypatch.setattr("loopwright.execution.ray.executor.Listener", Unreachable)
    asyncio.run(main())
    wait_until_free()


class TestRayExecutor(ExecutorContract):
    """Contract C01."""

    files = "auto"

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.directory = tmp_path / "run"

    def make_executor(self, parallel: int = 2, output_bytes: int = 1 << 20) -> Executor:
        system = RaySystem(parallel=parallel, cpus=0.1, grace_s=0.2, files=self.files)
        return system.model_copy(update={"output": output_bytes}).executor(self.directory)
