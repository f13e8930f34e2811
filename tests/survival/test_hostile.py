"""Commands that misbehave, run by the command line: each gets the right outcome, and nothing is left behind."""

import contextlib
import time
from pathlib import Path

import pytest

from loopwright.core.outcome import Fault, Outcome
from tests.survival.campaign import SCENARIO, Campaign, processes

# `exec`, since a shell whose child is ended would print "Terminated".
WORK = r"""#!/bin/sh
case "$1" in
  ignores-sigterm) trap '' TERM; exec sleep 1000 ;;
  never-ends)      exec sleep 1000 ;;
  daemon)          setsid sh -c 'setsid sleep 1001 & setsid sleep 1002 &' > /dev/null 2>&1 ;;
  stubborn-daemon) setsid sh -c 'trap "" TERM HUP; sleep 1003; sleep 1004' > /dev/null 2>&1 & ;;
  holds-pipe)      setsid sleep 1005 & ;;
  gigabyte)        head -c 1000000000 /dev/zero ;;
  bad-utf8)        printf '\377\376\300\n'; printf '\377 complaint \200\n' >&2 ;;
  bad-utf8-fails)  printf '\377 complaint \200\n' >&2; exit 5 ;;
  segfault)        kill -SEGV $$ ;;
  kills-itself)    kill -KILL $$ ;;
  kills-group)     kill -KILL 0 ;;
  silent)          exit 0 ;;
  reads-stdin)     cat ;;
  clears-away)     rm -rf "$PWD" ;;
esac
echo "y: 1 z: 2"
"""

OUTCOMES = {
    "ignores-sigterm": (Outcome.TIMEOUT, "timed out after 1 s"),
    "never-ends": (Outcome.TIMEOUT, "timed out after 1 s"),
    "daemon": (Outcome.OK, ""),
    "stubborn-daemon": (Outcome.OK, ""),
    "holds-pipe": (Outcome.OK, ""),
    "bad-utf8": (Outcome.OK, ""),
    "bad-utf8-fails": (Outcome.CRASHED, "exit code 5; stderr ends with: \ufffd complaint \ufffd"),
    "segfault": (Outcome.CRASHED, "ended by signal 11"),
    "kills-itself": (Outcome.CRASHED, "ended by signal 9"),
    "kills-group": (Outcome.CRASHED, "ended by signal 9"),
    "silent": (Outcome.METRIC_MISSING, "y: stdout is empty; z: stdout is empty"),
    "reads-stdin": (Outcome.OK, ""),
}


def scenario(names, *, timeout_s):
    return SCENARIO.format(
        parallel=2,
        agent='{ type = "grid" }',
        reward='{ type = "identity", metrics = ["y"] }',
        run="",
        workload=f"timeout_s = {timeout_s}",
        args=f"a = {list(names)}\nb = 0",
        more="",
    ).replace("[system]\n", "[system]\ngrace_s = 0.2\n")


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    campaign = Campaign(tmp_path_factory.mktemp("hostile"), scenario(OUTCOMES, timeout_s=1), work=WORK)
    result = campaign.call()
    assert (result.code, result.err) == (0, "")
    return campaign


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_hostile_command_gets_the_right_outcome(campaign, name):
    (trial,) = [trial for trial in campaign.trials() if trial.action["a"] == name]

    assert (trial.outcome, trial.reason) == OUTCOMES[name]
    assert trial.fault is (None if trial.outcome is Outcome.OK else Fault.WORKLOAD)


def test_no_hostile_command_leaves_anything_running(campaign):
    assert campaign.left_running() == []
    assert [command for _, command in processes() if " sleep 100" in command and str(campaign.output) in command] == []


def test_output_that_is_not_utf8_is_unchanged(campaign):
    (trial,) = [trial for trial in campaign.trials() if trial.action["a"] == "bad-utf8"]

    folder = campaign.output / "work" / "trials" / str(trial.number)
    assert (folder / "stdout").read_bytes() == b"\xff\xfe\xc0\ny: 1 z: 2\n"
    assert (campaign.output / "report.html").read_text()


def test_a_gigabyte_of_output_uses_neither_memory_nor_disk(tmp_path):
    campaign = Campaign(tmp_path, scenario(["gigabyte", "silent"], timeout_s=100), work=WORK)
    process = campaign.start(stdout=None, stderr=None)

    # Polled, since it is gone with the process; rusage would include the memory of the parent.
    peak_kb = 0
    while process.poll() is None:
        with contextlib.suppress(OSError, StopIteration):
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peak_kb = max(peak_kb, next(int(line.split()[1]) for line in status if line.startswith("VmHWM")))
        time.sleep(0.01)

    assert process.returncode == 0
    assert 0 < peak_kb < 250_000
    assert (campaign.output / "work" / "trials" / "1" / "stdout").stat().st_size < 65 * 2**20
    first = campaign.trials()[0]
    assert (first.outcome, first.metrics) == (Outcome.OK, {"y": 1, "z": 2})


def test_a_command_that_deletes_its_directory_affects_only_its_own_trial(tmp_path):
    campaign = Campaign(tmp_path, scenario(["clears-away", "daemon"], timeout_s=10), work=WORK)

    result = campaign.call()

    assert "Traceback" not in result.err
    assert [trial.outcome for trial in campaign.trials()] == [Outcome.METRIC_MISSING, Outcome.OK]
