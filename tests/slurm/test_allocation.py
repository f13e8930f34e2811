"""Allocation mode: one job, trials are its steps."""

import os
import signal

import pytest

import loopwright
from loopwright.core.outcome import Outcome
from tests.slurm.campaign import attempts_of, campaign, eventually, jobs_of, trials_of
from tests.survival.campaign import end_of

SYSTEM = 'mode = "allocation"\nnodes = 2\ntime_limit_s = 600'


def test_c01_trials_are_steps_of_one_allocation(slurm, tmp_path):
    work = '#!/bin/sh\n[ $1 = 3 ] && exit 7\n[ $1 = 4 ] && sleep 100\necho "y: $1$SLURM_STEP_NUM_NODES"\n'
    one = campaign(tmp_path, 4, parallel=8, system=SYSTEM, workload="nodes = [1, 2]\ntimeout_s = 4", work=work)
    before = set(jobs_of(slurm))
    result = one.call()
    assert result.code == 0, result.err
    (job,) = set(jobs_of(slurm)) - before
    eventually(lambda: jobs_of(slurm)[job] not in ("RUNNING", "COMPLETING"))
    trials = {(trial.action["n"], trial.action["nodes"]): trial for trial in trials_of(one)}
    assert {point: trial.metrics.get("y") for point, trial in trials.items() if point[0] < 3} == {
        (n, nodes): 10 * n + nodes for n in (1, 2) for nodes in (1, 2)
    }
    assert "exit code 7" in trials[3, 1].reason
    assert trials[4, 1].outcome is Outcome.TIMEOUT


@pytest.mark.slow
def test_c02_resume_continues_with_the_allocation(slurm, tmp_path):
    gate = tmp_path / "gate"
    work = f'#!/bin/sh\nwhile [ ! -e {gate} ]; do sleep 0.5; done\necho "y: $1"\n'
    one = campaign(tmp_path, 6, parallel=4, system=SYSTEM, work=work)
    before = set(jobs_of(slurm))
    process = one.start()
    eventually(lambda: len(list(one.output.glob("work/trials/*/stdout"))) == 4, process)
    os.killpg(process.pid, signal.SIGKILL)
    end_of(process)
    process = one.start("resume")
    gate.touch()
    result = end_of(process)
    assert result.code == 0, result.err
    assert len(set(jobs_of(slurm)) - before) == 1
    assert [(trial.number, trial.metrics["y"]) for trial in trials_of(one)] == [(n, n) for n in range(1, 7)]
    assert attempts_of(one) == {n: ["ok"] for n in range(1, 7)}


@pytest.mark.slow
def test_c03_the_trials_of_an_allocation_that_somebody_cancels_are_aborted(slurm, tmp_path):
    gate = tmp_path / "gate"
    work = f'#!/bin/sh\nwhile [ ! -e {gate} ]; do sleep 0.5; done\necho "y: $1"\n'
    one = campaign(tmp_path, 3, parallel=2, system=SYSTEM, work=work)
    before = set(jobs_of(slurm))
    process = one.start()
    eventually(lambda: len(list(one.output.glob("work/trials/*/stdout"))) == 2, process)
    slurm.run("scancel", *(set(jobs_of(slurm)) - before))
    eventually(lambda: attempts_of(one).get(2) == ["aborted"], process)
    gate.touch()
    assert end_of(process).code == 0
    assert attempts_of(one) == {1: ["aborted"], 2: ["aborted"], 3: ["ok"]}


@pytest.mark.slow
def test_c05_functions_share_no_device(slurm, tmp_path):
    """Given an allocation of two nodes with two GPUs each, four calls at a time have one of them each."""
    (tmp_path / "devices.py").write_text(f"""
import os, pathlib, time

def measure(n):
    place = pathlib.Path({str(tmp_path)!r})
    device = os.environ["CUDA_VISIBLE_DEVICES"]
    (place / f"{{os.environ['SLURMD_NODENAME']}}.{{device}}.used").touch()
    while len(list(place.glob("*.used"))) < 4:
        time.sleep(0.1)
    return {{"y": int(device)}}
""")
    scenario = {
        "name": "devices",
        "system": {"type": "slurm", "parallel": 4, "poll_s": 1, "mode": "allocation", "nodes": 2, "gpus": 2},
        "run": [
            {
                "name": "work",
                "agent": {"type": "grid"},
                "reward": {"type": "identity", "metrics": ["y"]},
                "workload": {
                    "type": "python",
                    "function": "devices:measure",
                    "gpus": 1,
                    "timeout_s": 60,
                    "args": {"n": [1, 2, 3, 4]},
                },
            }
        ],
    }
    study = loopwright.run({**scenario, "home": str(tmp_path)}, output=tmp_path / "out")
    assert sorted(trial.metrics["y"] for trial in study.trials()) == [0, 0, 1, 1]
