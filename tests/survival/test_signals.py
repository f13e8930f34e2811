"""Ctrl-C and SIGTERM: trials are `aborted`, reports written, `resume` completes; a second signal ends all."""

import csv
import os
import signal
import subprocess
import time

import pytest

from loopwright.core.outcome import Outcome
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.load import load
from loopwright.workloads import command
from tests.survival.campaign import SCENARIO, Campaign, end_of, read_all, wait_for

TRIALS = 6
# The second half waits for a file, so that the signal always comes in the middle.
GATED = """#!/bin/sh
echo started
[ $1 -gt 2 ] && while [ ! -e {gate} ]; do sleep 0.05; done
echo "y: $1 z: 0"
"""
STUBBORN = GATED.replace("echo started", "trap '' TERM INT; echo started")


def campaign_at(tmp_path, work=GATED, grace_s=2.0):
    text = SCENARIO.format(
        parallel=2,
        agent='{ type = "grid" }',
        reward='{ type = "identity", metrics = ["y"] }',
        run="",
        workload="",
        args=f"a = {list(range(1, TRIALS + 1))}\nb = 0",
        more="",
    ).replace("[system]\n", f"[system]\ngrace_s = {grace_s}\n")
    return Campaign(tmp_path, text, work=work.replace("{gate}", str(tmp_path / "gate")))


def in_the_middle(campaign, process):
    """Wait until two trials are done and two are in flight."""
    printed = [campaign.output / "work" / "trials" / str(number) / "stdout" for number in (3, 4)]
    wait_for(lambda: process.poll() is not None or all(path.exists() and path.read_bytes() for path in printed))
    assert process.poll() is None, end_of(process)


def in_a_terminal(campaign):
    """Start it in a terminal of its own; returns the process, and the user's end of the terminal."""
    ours, theirs = os.openpty()
    terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "preexec_fn": lambda: os.login_tty(0)}
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "240"}  # no line wraps
    process = campaign.start(**terminal, start_new_session=False, env=environment)
    os.close(theirs)
    return process, ours


def completes(campaign, tmp_path):
    (tmp_path / "gate").touch()
    result = campaign.call("resume")
    assert (result.code, result.err) == (0, "")
    assert [(trial.number, trial.outcome) for trial in campaign.trials()] == [
        (number, Outcome.OK) for number in range(1, TRIALS + 1)
    ]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_s12_a_signal_aborts_the_trials_in_flight_and_resume_completes(tmp_path, number, code):
    campaign = campaign_at(tmp_path)
    process = campaign.start()
    in_the_middle(campaign, process)

    process.send_signal(number)
    result = end_of(process)

    assert (result.code, result.err) == (code, "")
    assert [trial.outcome for trial in campaign.trials()] == ["ok", "ok", "aborted", "aborted"]
    assert (campaign.output / "report.html").exists()
    assert (campaign.output / "work" / "trajectory.csv").exists()
    assert f"loopwright resume {campaign.output}" in result.out
    assert campaign.left_running() == []
    completes(campaign, tmp_path)


def test_s12_a_second_signal_ends_everything_at_once(tmp_path):
    # Commands that ignore SIGTERM, and a very long grace period.
    campaign = campaign_at(tmp_path, STUBBORN, grace_s=1000)
    process, ours = in_a_terminal(campaign)
    in_the_middle(campaign, process)

    os.write(ours, b"\x03")
    screen = ""
    while "Ctrl-C again stops at once" not in screen:
        screen += os.read(ours, 4096).decode()
    assert process.poll() is None
    os.write(ours, b"\x03")
    screen += read_all(ours)

    assert process.wait(timeout=60) == 130, screen
    assert screen.endswith("stopped at once; continue with `loopwright resume`\r\n")
    assert screen.rfind("\x1b[?25h") > screen.rfind("\x1b[?25l"), "the cursor is shown again"
    wait_for(lambda: campaign.left_running() == [])
    completes(campaign, tmp_path)


def test_s12_ctrl_c_in_a_terminal_with_a_live_bar(tmp_path):
    campaign = campaign_at(tmp_path)
    process, ours = in_a_terminal(campaign)
    in_the_middle(campaign, process)

    os.write(ours, b"\x03")
    screen = read_all(ours)
    code = process.wait(timeout=60)

    assert code == 130, screen
    assert "2/6 done" in screen
    assert "stopped; continue with: loopwright resume" in screen
    assert screen.rfind("\x1b[?25h") > screen.rfind("\x1b[?25l"), "the cursor is shown again"
    assert "Traceback" not in screen
    assert [trial.outcome for trial in campaign.trials()] == ["ok", "ok", "aborted", "aborted"]
    assert campaign.left_running() == []
    completes(campaign, tmp_path)


def test_a_second_process_on_one_output_directory_is_refused_and_the_first_continues(tmp_path):
    campaign = campaign_at(tmp_path)
    process = campaign.start()
    in_the_middle(campaign, process)

    refused = [campaign.call("run"), campaign.call("resume")]

    for result in refused:
        assert result.code == 1
        assert result.err.startswith(f"error: {campaign.output} is in use by process {process.pid}. ")
        assert result.err.count("\n") == 1
    (tmp_path / "gate").touch()
    first = end_of(process)
    assert (first.code, first.err) == (0, "")
    assert campaign.numbers() == list(range(1, TRIALS + 1))
    assert {trial.outcome for trial in campaign.trials()} == {Outcome.OK}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(tmp_path, number):
    """As under `nohup`, or in the background job of a script; SIGTERM still ends it."""
    campaign = campaign_at(tmp_path)
    process = campaign.start(preexec_fn=lambda: signal.signal(number, signal.SIG_IGN))
    in_the_middle(campaign, process)

    process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.send_signal(signal.SIGTERM)
    result = end_of(process)

    assert (result.code, result.err) == (143, "")
    assert campaign.left_running() == []


@pytest.mark.parametrize("where", ["metrics = { y = { regex = '(a|aa)+$' } }", "success = { regex = '(a|aa)+$' }"])
def test_s12_a_pattern_that_backtracks_without_end_does_not_outlive_a_signal(tmp_path, where):
    """It fails its trial in the end (see test_metric.py); until then, the event loop hears everything."""
    campaign = campaign_at(tmp_path, work="#!/bin/sh\nprintf '%05000dx' 0 | tr 0 a\n")
    text = campaign.scenario.read_text()
    line = next(line for line in text.splitlines() if line.startswith("metrics"))
    campaign.scenario.write_text(text.replace(line, where if "metrics" in where else f"{line}\n{where}"))
    process = campaign.start()
    stdout = campaign.output / "work" / "trials" / "1" / "stdout"
    wait_for(lambda: process.poll() is not None or (stdout.exists() and stdout.stat().st_size > 5000))
    assert process.poll() is None, end_of(process)
    time.sleep(0.3)  # the command has ended, and its output is being matched

    process.send_signal(signal.SIGINT)

    assert end_of(process).code == 130
    assert {trial.outcome for trial in campaign.trials()} == {Outcome.ABORTED}


def test_a_pattern_that_backtracks_without_end_fails_its_trial(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_MATCH_S", 0.1)
    work = "#!/bin/sh\nprintf '%05000dx' 0 | tr 0 a\n"
    campaign = campaign_at(tmp_path, work=work)
    text = campaign.scenario.read_text()
    campaign.scenario.write_text(text.replace("'y: (\\d+)'", "'(a|aa)+$'"))
    assert dispatch(load(campaign.scenario), campaign.output) == 1
    first = campaign.trials()[0]
    assert (first.outcome, first.metrics) == (Outcome.METRIC_MISSING, {})
    assert first.reason.startswith("y: matching '(a|aa)+$' in stdout (5,001 bytes) took more than 0.1 s. Avoid repeats")


def test_s13_after_kill_9_the_trajectory_has_every_trial_that_ended(tmp_path):
    """Nothing has to be resumed or reported first."""
    campaign = campaign_at(tmp_path)
    process = campaign.start()
    in_the_middle(campaign, process)
    trajectory = campaign.output / "work" / "trajectory.csv"
    wait_for(lambda: len(trajectory.read_text().splitlines()) == 3)
    os.killpg(process.pid, signal.SIGKILL)
    end_of(process)
    with trajectory.open(newline="") as file:
        rows = list(csv.DictReader(file))
    recorded = {trial.number: trial for trial in campaign.trials() if trial.outcome is not None}
    assert {int(row["trial"]) for row in rows} == recorded.keys() == {1, 2}
    assert all(float(row["metric.y"]) == recorded[int(row["trial"])].metrics["y"] for row in rows)
    completes(campaign, tmp_path)
    assert len(trajectory.read_text().splitlines()) == TRIALS + 1
