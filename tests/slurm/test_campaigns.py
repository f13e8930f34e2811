"""Campaigns on Slurm: the same scenario, adopted jobs, told apart failures, one query per interval."""

import asyncio
import os
import signal
import time
from dataclasses import replace

import pytest

import loopwright
from loopwright.core.errors import ClusterError, LaunchError, LedgerError, ScenarioError
from loopwright.core.outcome import Outcome
from loopwright.execution import Completion
from loopwright.execution.slurm.outcome import ending_of
from loopwright.execution.slurm.queue import JobInfo, SubmitError
from loopwright.execution.slurm.system import SlurmSystem
from loopwright.ledger.ledger import Ledger
from loopwright.testing.executors import command, ignore
from tests.slurm.campaign import attempts_of, campaign, eventually, jobs_of, trials_of
from tests.survival.campaign import end_of

FUNCTION = """
import os

def measure(n):
    print("hello")
    if n == 3:
        raise ValueError("three is bad")
    return {"y": 10 * n + int(os.environ["SLURM_JOB_NUM_NODES"])}
"""


def test_c01_a_function_runs_on_slurm_and_nodes_are_searched(slurm, tmp_path):
    (tmp_path / "model.py").write_text(FUNCTION)
    scenario = {
        "name": "function",
        "system": {"type": "slurm", "parallel": 6, "poll_s": 1},
        "run": [
            {
                "name": "f",
                "agent": {"type": "grid"},
                "reward": {"type": "identity", "metrics": ["y"]},
                "workload": {
                    "type": "python",
                    "function": "model:measure",
                    "metrics": ["y"],
                    "nodes": [1, 2],
                    "timeout_s": 60,
                    "args": {"n": [1, 2, 3]},
                },
            }
        ],
    }
    assert loopwright.run({**scenario, "home": str(tmp_path)}, output=tmp_path / "out").code == 0
    with Ledger.read(tmp_path / "out/f/ledger.db") as ledger:
        trials = {(trial.action["n"], trial.action["nodes"]): trial for trial in ledger.trials()}
    assert {point: trial.metrics.get("y") for point, trial in trials.items()} == {
        (n, nodes): 10 * n + nodes if n < 3 else None for n in (1, 2, 3) for nodes in (1, 2)
    }
    assert (trials[3, 2].outcome, trials[3, 2].reason) == (Outcome.CRASHED, "ValueError: three is bad")
    assert (tmp_path / "out/f/trials/1/stdout").read_text() == "hello\n"


def test_c02_resume_adopts_running_jobs_and_collects_finished_ones(slurm, tmp_path):
    """Given four jobs whose Loopwright was killed, and one of which ends meanwhile, none is submitted twice."""
    gate = tmp_path / "gate"
    work = f'#!/bin/sh\n[ $1 = 1 ] || while [ ! -e {gate} ]; do sleep 0.2; done\nsleep 1\necho "y: $1"\n'
    one = campaign(tmp_path, 4, parallel=4, work=work)
    process = one.start()
    eventually(lambda: len(jobs_of(slurm, "RUNNING")) == 4, process)
    before = set(jobs_of(slurm))
    os.killpg(process.pid, signal.SIGKILL)
    end_of(process)
    eventually((one.output / "work/trials/1/stdout").exists)
    with pytest.raises(LedgerError, match="has jobs on another system"):
        loopwright.run(one.scenario, one.output, set={"system.type": "local"}, resume=True)
    gate.touch()
    result = one.call("resume")
    assert result.code == 0, result.err
    assert set(jobs_of(slurm)) == before
    assert [(trial.number, trial.metrics["y"]) for trial in trials_of(one)] == [(n, n) for n in range(1, 5)]
    assert attempts_of(one) == {n: ["ok"] for n in range(1, 5)}


def test_c03_a_wrong_partition_and_an_impossible_request_fail_in_slurms_words(slurm, tmp_path):
    one = campaign(tmp_path / "partition", 2, parallel=2, system='partition = "nope"')
    result = one.call()
    assert result.code != 0
    assert "Invalid partition name specified" in result.err
    assert "Traceback" not in result.err
    two = campaign(tmp_path / "nodes", 1, parallel=1, workload="nodes = [1, 5]")
    assert two.call().code == 0
    good, bad = trials_of(two)
    assert (good.outcome, bad.outcome) == (Outcome.OK, Outcome.CRASHED)
    assert "never starts job" in bad.reason
    assert not jobs_of(slurm, "PENDING", "RUNNING")


def test_c03_states_are_told_apart(tmp_path):
    """Each final state without a result is another ending; only lost nodes and preemption are retried."""
    log = tmp_path / "job.log"
    log.write_text("")

    def ending(state, record=None, reason="", completion=None):
        info = JobInfo("7", state, reason, "n1")
        try:
            end = ending_of(info, completion, record or {}, log, stopped=False)
        except LaunchError as error:
            return ("cancelled" if error.cancelled else "lost") if error.infra else "refused"
        return ("timeout" if end.timed_out else "killed"), end.reason

    assert ending("TIMEOUT") == ("timeout", "Slurm job 7 on n1 reached Slurm's time limit (TIMEOUT)")
    assert ending("DEADLINE")[0] == "timeout"
    assert ending("OUT_OF_MEMORY") == ("killed", "Slurm job 7 on n1 ran out of memory (OUT_OF_MEMORY)")
    killed = Completion(None, 9, False, {"wall_s": 1.0}, 5, 0)
    assert ending("OUT_OF_MEMORY", completion=killed)[1].endswith("(OUT_OF_MEMORY)")
    assert ending("FAILED", completion=killed) == ("killed", "")
    for state in ("NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "GONE"):
        assert ending(state) == "lost"
    assert ending("PREEMPTED", {"interrupted": True}) == "lost"
    assert ending("CANCELLED", {"interrupted": True}) == ending("CANCELLED") == "cancelled"
    assert ending("FAILED", reason="JobLaunchFailure") == "lost"
    log.unlink()
    with pytest.raises(ClusterError, match="that all compute nodes share"):
        ending("FAILED", reason="NonZeroExitCode")
    assert SubmitError("sbatch: error: Batch job submission failed: Socket timed out on send/recv").transient
    assert not SubmitError("sbatch: error: invalid partition specified: nope").transient


def test_c04_all_jobs_are_followed_by_one_query_per_interval(slurm, tmp_path):
    """Given twenty jobs, the queue is asked as often as for one."""
    executor = SlurmSystem(parallel=20, poll_s=1).executor(tmp_path)

    async def main():
        directories = [tmp_path / str(number) for number in range(20)]
        for directory in directories:
            directory.mkdir()
        try:
            return await asyncio.gather(*(executor.run(command(each, "sleep 1"), ignore) for each in directories))
        finally:
            await executor.close()

    start_s = time.monotonic()
    assert [done.exit_code for done in asyncio.run(main())] == [0] * 20
    assert executor.queue.queries <= 2 + (time.monotonic() - start_s)


@pytest.mark.parametrize(("mode", "handle"), [("per_trial", ""), ("allocation", ""), ("per_trial", "slurm:lw-1:0")])
def test_s12_a_run_can_be_interrupted_while_slurm_does_not_answer(tmp_path, monkeypatch, mode, handle):
    """Given a controller that is away, a command ends that waits for its submission, or for news of its adopted job."""
    for name in ("sbatch", "squeue", "scancel"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\necho 'Unable to contact slurm controller (connect failure)' >&2\nexit 1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr("loopwright.execution.slurm.executor._LAG_S", 0.0)

    async def main():
        executor = SlurmSystem(mode=mode, poll_s=1).executor(tmp_path)
        running = asyncio.ensure_future(executor.run(replace(command(tmp_path, "true"), handle=handle), ignore))
        await asyncio.sleep(0.3)
        running.cancel()
        async with asyncio.timeout(10):
            await asyncio.wait([running])
        assert running.cancelled()
        await executor.close()

    asyncio.run(main())
    assert not list(tmp_path.glob("jobs/*.json"))
    assert not list(tmp_path.glob("jobs/*.requests"))


def test_a_live_run_in_an_allocation_is_refused_at_load_time():
    scenario = {
        "name": "live",
        "system": {"type": "slurm", "mode": "allocation"},
        "run": [{"name": "x", "agent": {"type": "random", "trials": 2}, "live": {"address": "127.0.0.1:1"}}],
    }
    with pytest.raises(ScenarioError, match="cannot run a live environment"):
        loopwright.load(scenario)


@pytest.mark.parametrize(
    ("system", "workload", "message"),
    [
        ({"nodes": 2}, {"nodes": [1, 3]}, "nodes: 3 is more than the allocation has"),
        ({"gpus": 1}, {"gpus": 2}, "gpus: 2 per trial is more than the allocation has"),
        (
            {"gpus": 2, "launcher": "direct", "parallel": 2},
            {"gpus": 1},
            r"launcher: .direct. gives .* no GPUs of their",
        ),
    ],
)
def test_c05_an_allocation_gives_what_it_has(system, workload, message):
    with pytest.raises(ScenarioError, match=message):
        loopwright.load(
            {
                "name": "wide",
                "system": {"type": "slurm", "mode": "allocation", **system},
                "run": [{"name": "x", "workload": {"type": "command", "command": "true {nodes}", **workload}}],
            }
        )


def test_several_nodes_are_refused_on_one_machine():
    scenario = {
        "name": "local",
        "run": [{"name": "x", "workload": {"type": "command", "command": "true", "nodes": 2}}],
    }
    with pytest.raises(ScenarioError, match=r"nodes: more than one needs a cluster"):
        loopwright.load(scenario)
