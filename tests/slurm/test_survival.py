"""What clusters do to jobs, on a real one: each of these ends with every trial recorded once."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from loopwright.core.outcome import Fault, Outcome
from tests.slurm.campaign import attempts_of, campaign, eventually, jobs_of, trials_of
from tests.survival.campaign import end_of

pytestmark = pytest.mark.slow


def gated(tmp_path: Path) -> tuple[Path, str]:
    """A file, and a command that runs until it exists."""
    gate = tmp_path / "gate"
    return gate, f'#!/bin/sh\nwhile [ ! -e {gate} ]; do sleep 0.5; done\necho "y: $1"\n'


def test_c02_a_hundred_running_jobs_are_adopted(slurm, tmp_path):
    gate, work = gated(tmp_path)
    one = campaign(tmp_path, 110, parallel=100, work=work)
    process = one.start()
    eventually(lambda: len(jobs_of(slurm, "RUNNING")) == 100, process)
    before = set(jobs_of(slurm))
    os.killpg(process.pid, signal.SIGKILL)
    end_of(process)
    process = one.start("resume")
    time.sleep(5)  # long enough to submit them again
    assert set(jobs_of(slurm)) == before
    gate.touch()
    result = end_of(process)
    assert result.code == 0, result.err
    assert len(set(jobs_of(slurm)) - before) == 10
    assert [(trial.number, trial.outcome, trial.metrics["y"]) for trial in trials_of(one)] == [
        (n, Outcome.OK, n) for n in range(1, 111)
    ]
    assert attempts_of(one) == {n: ["ok"] for n in range(1, 111)}


@pytest.mark.parametrize("moment_s", [0.6, 0.8, 1.0, 1.3, 1.6])
def test_c02_a_kill_at_any_moment_of_submission_leaves_each_trial_once(slurm, tmp_path, moment_s):
    """Also between the record and sbatch, and while sbatch runs."""
    log = tmp_path / "log"
    one = campaign(tmp_path, 4, parallel=2, work=f'#!/bin/sh\necho $1 >> {log}\nsleep 1\necho "y: $1"\n')
    process = one.start()
    time.sleep(moment_s)
    os.killpg(process.pid, signal.SIGKILL)
    end_of(process)
    result = one.call("resume" if (one.output / "campaign.json").exists() else "run")
    assert result.code == 0, result.err
    assert [(trial.number, trial.metrics["y"]) for trial in trials_of(one)] == [(n, n) for n in range(1, 5)]
    assert sorted(log.read_text().split()) == ["1", "2", "3", "4"]


@pytest.mark.parametrize("stage", ["pre", "post"])
def test_c02_a_step_that_runs_is_adopted_and_what_has_ended_is_not_repeated(slurm, tmp_path, stage):
    """Given a kill while a step is in the queue, each of the three commands of a trial runs once."""
    gate, log = tmp_path / "gate", tmp_path / "log"
    wait = f"while [ ! -e {gate} ]; do sleep 0.2; done"
    steps = {"pre": f"echo pre >> {log}", "post": f"echo post >> {log}"}
    steps[stage] += f"; {wait}"
    run = "\n".join(f'{key} = [["sh", "-c", "{command}"]]' for key, command in steps.items())
    one = campaign(tmp_path, 2, parallel=1, run=run, work=f'#!/bin/sh\necho work >> {log}\necho "y: $1"\n')
    process = one.start()
    eventually(lambda: log.exists() and stage in log.read_text().split(), process)
    before = set(jobs_of(slurm, "RUNNING"))
    os.killpg(process.pid, signal.SIGKILL)
    end_of(process)
    process = one.start("resume")
    time.sleep(3)  # long enough to submit it again
    assert set(jobs_of(slurm, "RUNNING", "PENDING")) == before
    gate.touch()
    result = end_of(process)
    assert result.code == 0, result.err
    assert log.read_text().split() == ["pre", "work", "post"] * 2
    assert [(trial.number, trial.metrics["y"]) for trial in trials_of(one)] == [(1, 1), (2, 2)]


def test_s12_an_interrupted_run_cancels_its_jobs_and_resumes(slurm, tmp_path):
    gate, work = gated(tmp_path)
    one = campaign(tmp_path, 6, parallel=6, work=work)
    process = one.start()
    eventually(lambda: len(jobs_of(slurm, "RUNNING")) == 6, process)
    process.send_signal(signal.SIGINT)
    assert end_of(process).code == 130
    assert not jobs_of(slurm, "RUNNING", "PENDING")
    assert {trial.outcome for trial in trials_of(one)} == {Outcome.ABORTED}
    gate.touch()
    assert one.call("resume").code == 0
    assert [trial.metrics["y"] for trial in trials_of(one)] == [1, 2, 3, 4, 5, 6]


def test_c03_a_failed_node_is_another_attempt_and_a_drained_one_waits(slurm, tmp_path):
    gate, work = gated(tmp_path)
    one = campaign(tmp_path, 2, parallel=2, work=work, system='nodelist = "n2"')
    process = one.start()
    eventually(lambda: len(jobs_of(slurm, "RUNNING")) == 2, process)
    slurm.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    slurm.run("scontrol", "update", "nodename=n2", "state=resume")
    eventually(lambda: list(attempts_of(one).values()) == [["lost", None]] * 2, process)
    slurm.run("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    gate.touch()
    time.sleep(3)
    slurm.run("scontrol", "update", "nodename=n2", "state=resume")
    result = end_of(process)
    assert result.code == 0, result.err
    assert attempts_of(one) == {1: ["lost", "ok"], 2: ["lost", "ok"]}
    assert [trial.number for trial in trials_of(one)] == [1, 2]


def test_c03_a_job_that_somebody_cancels_is_aborted(slurm, tmp_path):
    gate, work = gated(tmp_path)
    one = campaign(tmp_path, 2, parallel=2, work=work)
    process = one.start()
    eventually(lambda: len(jobs_of(slurm, "RUNNING")) == 2, process)
    slurm.run("scancel", next(iter(jobs_of(slurm, "RUNNING"))))
    eventually(lambda: Outcome.ABORTED in [trial.outcome for trial in trials_of(one)], process)
    gate.touch()
    assert end_of(process).code == 0
    trials = sorted(trials_of(one), key=lambda trial: str(trial.outcome))
    assert [(trial.outcome, trial.fault) for trial in trials] == [(Outcome.ABORTED, Fault.INFRA), (Outcome.OK, None)]
    assert "cancelled by somebody else" in trials[0].reason
    assert one.call("resume").code == 0
    assert [trial.metrics["y"] for trial in trials_of(one)] == [1, 2]


def test_c03_preemption_is_another_attempt(slurm, tmp_path):
    gate, work = gated(tmp_path)
    one = campaign(tmp_path, 2, parallel=2, work=work, system='partition = "low"\nnodelist = "n1"')
    process = one.start()
    eventually(lambda: len(jobs_of(slurm, "RUNNING")) == 2, process)
    urgent = ("--partition=high", "--nodelist=n1", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    assert slurm.run("sbatch", *urgent).returncode == 0
    eventually(lambda: list(attempts_of(one).values()) == [["lost", None]] * 2, process)
    gate.touch()
    result = end_of(process)
    assert result.code == 0, result.err
    assert attempts_of(one) == {1: ["lost", "ok"], 2: ["lost", "ok"]}


def test_the_controller_may_restart(slurm, tmp_path):
    one = campaign(tmp_path, 12, parallel=4, work='#!/bin/sh\nsleep 1\necho "y: $1"\n')
    process = one.start()
    eventually(lambda: len(jobs_of(slurm, "RUNNING")) > 0, process)
    slurm.kill("slurmctld")
    time.sleep(5)
    slurm.start_controller()
    result = end_of(process)
    assert result.code == 0, result.err
    assert [(trial.number, trial.metrics["y"]) for trial in trials_of(one)] == [(n, n) for n in range(1, 13)]
    assert attempts_of(one) == {n: ["ok"] for n in range(1, 13)}


def test_sbatch_may_fail_for_a_while(slurm, tmp_path, monkeypatch):
    """Given an sbatch that submits and then loses the answer, and fails twice more, each trial runs once."""
    log, count = tmp_path / "log", tmp_path / "count"
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(f"""#!/bin/sh
echo x >> {count}
calls=$(wc -l < {count})
[ "$calls" = 1 ] && {shutil.which("sbatch")} "$@" > /dev/null
[ "$calls" -gt 3 ] && exec {shutil.which("sbatch")} "$@"
[ "$calls" = 2 ] && cat > /dev/null
echo "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)" >&2
exit 1
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    one = campaign(tmp_path, 4, parallel=2, work=f'#!/bin/sh\necho $1 >> {log}\necho "y: $1"\n')
    result = one.call()
    assert result.code == 0, result.err
    assert [trial.metrics["y"] for trial in trials_of(one)] == [1, 2, 3, 4]
    assert sorted(log.read_text().split()) == ["1", "2", "3", "4"]


def test_a_cluster_may_allow_no_arrays_and_few_jobs(slurm, tmp_path, monkeypatch):
    """Given limits below `parallel`, jobs are submitted one by one, and wait for those in the queue."""
    program, refusal = tmp_path / "bin" / "sbatch", "sbatch: error: Batch job submission failed:"
    program.parent.mkdir()
    program.write_text(f"""#!/bin/sh
case "$*" in
*--test-only*) ;;
*--array=*) echo "{refusal} Invalid job array specification" >&2; exit 1 ;;
*) [ $(squeue --noheader --states=PD,R | wc -l) -lt 2 ] || {{
    echo "{refusal} Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)" >&2; exit 1
}} ;;
esac
exec {shutil.which("sbatch")} "$@"
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    one = campaign(tmp_path, 6, parallel=4)
    result = one.call()
    assert result.code == 0, result.err
    assert "Waiting for those in its queue" in result.err
    assert attempts_of(one) == {n: ["ok"] for n in range(1, 7)}
    assert [*one.output.rglob("lw-*.json")] == [], "refused submissions leave no files"


def test_accounting_may_lag(slurm, tmp_path, monkeypatch):
    """Given a queue that forgets jobs at once and accounting that shows them late, a lost job is found to be lost."""
    programs = tmp_path / "bin"
    programs.mkdir()
    count = tmp_path / "count"
    real, shorter = shutil.which("squeue"), "sed 's/--states=all/--states=PENDING,RUNNING/'"
    (programs / "squeue").write_text(f'#!/bin/sh\n{real} $(echo "$*" | {shorter})\n')
    (programs / "sacct").write_text(f"""#!/bin/sh
echo x >> {count}
name=$(echo "$*" | sed 's/.*--name=//')
[ "$(wc -l < {count})" -gt 3 ] && echo "7|NODE_FAIL|None|n1|$name"
exit 0
""")
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    gate, work = gated(tmp_path)
    one = campaign(tmp_path, 2, parallel=1, work=work)
    process = one.start()
    eventually(lambda: len(jobs_of(slurm, "RUNNING")) == 1, process)
    slurm.run("scancel", "--signal=KILL", "--full", next(iter(jobs_of(slurm, "RUNNING"))))
    eventually(lambda: attempts_of(one) == {1: ["lost", None]}, process)
    gate.touch()
    assert end_of(process).code == 0
    assert attempts_of(one) == {1: ["lost", "ok"], 2: ["ok"]}
    assert len(count.read_text().split()) >= 4


def test_a_full_disk_on_the_compute_side_stops_the_run_and_is_not_the_trials_fault(slurm, tmp_path):
    """Given a disk that a trial's output fills, the run says so and ends; with more room, it is resumed."""
    trials, large = tmp_path / "out/work/trials", tmp_path / "large"
    work = f'#!/bin/sh\n[ $1 = 2 ] && [ -e {large} ] && head -c 400000 /dev/zero\necho "y: $1"\n'
    one = campaign(tmp_path, 3, parallel=1, work=work)
    trials.mkdir(parents=True)
    large.touch()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", trials], check=False).returncode:
        pytest.skip("this container may not mount")
    try:
        result = one.call()
        assert result.code == 1
        assert "the disk is full" in result.err
        assert [trial.outcome for trial in trials_of(one)] == [Outcome.OK, None]
        assert attempts_of(one)[2] == ["lost"]
        large.unlink()
        subprocess.run(["mount", "-o", "remount,size=8m", trials], check=True)
        assert one.call("resume").code == 0
        assert [trial.metrics["y"] for trial in trials_of(one)] == [1, 2, 3]
    finally:
        subprocess.run(["umount", trials], check=True)


def test_an_output_directory_that_nodes_do_not_see_is_an_error_before_the_first_trial(slurm, tmp_path):
    """Given a node on which the output directory is empty, the run ends with the reason, and nothing has run."""
    slurm.kill("slurmd.n1")
    slurm.start_node("n1", hidden=tmp_path)
    try:
        one = campaign(tmp_path / "here", 3, parallel=3, system='nodelist = "n1"')
        result = one.call()
    finally:
        slurm.kill("slurmd.n1")
        slurm.start_node("n1")
    assert result.code == 1
    assert "Choose an --output that all compute nodes share" in result.err
    assert "Traceback" not in result.err
    assert not list((one.output / "work").rglob("stdout"))
