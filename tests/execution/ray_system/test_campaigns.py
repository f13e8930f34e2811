"""Searches on Ray: the same scenario, nodes that die, drivers that are killed, and file systems that are not shared."""

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import loopwright
from loopwright.core.errors import ScenarioError
from loopwright.execution.local.processes import all_pids, read
from tests.survival.campaign import Campaign, end_of, wait_for

LOCAL = """
name = "local"
[system]
type = "ray"
address = "local"
parallel = 2
[[run]]
name = "work"
agent = { type = "grid" }
reward = { type = "identity", metrics = ["y"] }
[run.workload]
type = "command"
command = "sh -c 'touch began; sleep 600' {n}"
metrics = { y = { resource = "wall_s" } }
[run.workload.args]
n = [1, 2]
"""


def facts_of(name, directory):
    command = [sys.executable, "-m", "tests.execution.ray_system.campaigns", name, str(directory)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads((directory / "facts.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_c03_a_killed_driver_and_a_lost_node_lose_no_trial(tmp_path):
    """Given kill -9, resume and the loss of a node, each trial ends once, under its number, and nothing is left."""
    facts = facts_of("survive", tmp_path)
    assert facts["code"] == 0
    assert facts["numbers"] == [1, 2, 3, 4, 5, 6]
    assert facts["outcomes"] == ["ok"]
    assert facts["first"] == 1
    assert facts["most_attempts"] > 1
    assert facts["left"] == []
    assert set(facts["gpus"]) <= {"0", "1", "2", "3"}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_c01_output_and_artifacts_come_back_from_nodes_that_share_no_files(tmp_path):
    """Given `files = "copy"`, commands and functions have their inputs there and their files here."""
    facts = facts_of("copy", tmp_path)
    assert facts["command"]["code"] == facts["python"]["code"] == 0
    assert facts["command"]["ok"] == facts["python"]["ok"] == [True] * 6
    assert facts["command"]["files"] == ["gpu", "parameters.json", "stderr", "stdout", "work.sh"]
    assert {"made", "parameters.json", "stdout"} <= set(facts["python"]["files"])
    assert "no node of the Ray cluster is large enough" in facts["impossible"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_c05_ctrl_c_leaves_nothing_behind_and_trials_share_no_gpu(tmp_path):
    """Given Ctrl-C and resume on a node with four GPUs, three trials at a time each have a GPU of their own."""
    facts = facts_of("interrupt", tmp_path)
    assert (facts["interrupted"], facts["left"]) == (130, [])
    assert (facts["code"], facts["numbers"], facts["outcomes"]) == (0, [1, 2, 3, 4, 5, 6], ["ok"])
    times = facts["times"]
    assert len(times) == 6
    assert all(len(device) == 1 for device, _, _ in times), "one device each"
    for (device, _, end), (other, begin, _) in pairwise(times):
        assert device != other or end <= begin
    assert any(
        begin < finish and start < end for _, begin, end in times for _, start, finish in times if start != begin
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_s12_a_signal_to_the_process_group_ends_the_run_before_its_local_ray(tmp_path, monkeypatch, number, code):
    """Given a Ray that the driver started, a signal to their group aborts the trials, and the reports are written."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    one = Campaign(tmp_path, LOCAL)
    process = one.start()
    wait_for(lambda: process.poll() is not None or len(list(one.output.glob("work/trials/*/began"))) == 2)
    group = [pid for pid in all_pids() if (entry := read(pid)) is not None and entry.group == process.pid]
    names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in group}
    os.killpg(process.pid, number)
    end = end_of(process)
    assert not names & {"raylet", "gcs_server"}
    assert end.code == code, end.err
    assert [trial.outcome for trial in one.trials()] == ["aborted", "aborted"]
    assert (one.output / "report.html").exists()
    assert one.left_running() == []


def test_c01_what_ray_cannot_do_is_refused_at_load_time():
    """Given several nodes per trial, services or wrong resources, the scenario is refused with the fix."""
    workload = {"type": "command", "command": "true {port}", "nodes": 2}
    run = {"name": "work", "workload": workload}
    with pytest.raises(ScenarioError) as caught:
        loopwright.load({"name": "x", "system": {"type": "ray"}, "run": [run]})
    assert 'a trial on Ray takes one node; for more use [system] type = "slurm"' in str(caught.value)
    assert "{port}: needs [system] type = \"local\", not 'ray'" in str(caught.value)
    for system in ({"resources": {"CPU": 2}}, {"resources": {"tpu": 0}}, {"strategy": "STRICT"}, {"files": "nfs"}):
        with pytest.raises(ScenarioError):
            loopwright.load({"name": "x", "system": {"type": "ray", **system}, "run": [run]})
