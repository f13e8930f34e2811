"""Searches on Ray: the same scenario, nodes that die, drivers that are killed, and file systems that are not shared."""

import json
import subprocess
import sys
from itertools import pairwise

import pytest

import loopwright
from loopwright.core.errors import ScenarioError


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
    assert (facts["interrupted"], facts["left"], facts["actors"]) == (130, [], [])
    assert (facts["code"], facts["numbers"], facts["outcomes"]) == (0, [1, 2, 3, 4, 5, 6], ["ok"])
    times = facts["times"]
    assert len(times) == 6
    assert all(len(device) == 1 for device, _, _ in times), "one device each"
    for (device, _, end), (other, begin, _) in pairwise(times):
        assert device != other or end <= begin
    assert any(
        begin < finish and start < end for _, begin, end in times for _, start, finish in times if start != begin
    )


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
