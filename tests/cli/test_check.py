"""`loopwright check`, and that `resume` and `report` notice what it finds."""

import json
import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.command_line import run_verb
from tests.survival.campaign import SCENARIO, Campaign, wait_for

TEXT = SCENARIO.format(
    parallel=1,
    agent='{ type = "random", trials = 6, seed = 1 }',
    reward='{ type = "identity", metrics = ["y"] }',
    run="",
    workload="",
    args="a = [1, 2, 4, 5]\nb = [1, 2]",
    more="",
)


def call(*words):
    return run_verb(Path.cwd(), *words)


@pytest.fixture
def finished(tmp_path):
    campaign = Campaign(tmp_path, TEXT)
    assert campaign.call().code == 0
    return campaign


def test_a_run_is_in_order_and_a_changed_digit_is_not(finished):
    good = call("check", finished.output)
    assert good.returncode == 0, good.stderr
    assert good.stdout.startswith("work: ok (6 trials, ")

    with closing(sqlite3.connect(finished.ledger)) as connection:
        connection.execute("UPDATE trials SET reward = reward + 1 WHERE number = 2")
        connection.commit()

    bad = call("check", finished.output)
    assert (bad.returncode, bad.stdout.splitlines()[0][:13]) == (1, "work: DAMAGED")
    assert "the result of trial 2 is not what event" in bad.stdout
    assert f"accept the ledger as it is with `loopwright check {finished.output} --accept`" in bad.stdout
    (line,) = call("check", finished.output, "--json").stdout.splitlines()
    assert (json.loads(line)["ok"], len(json.loads(line)["damage"])) == (False, 1)

    for verb in ("resume", "report"):
        done = call(verb, finished.output)
        assert done.returncode == 1
        assert "is damaged: the result of trial 2" in done.stderr
    assert "is damaged: the result of trial 2" in (finished.output / "report.html").read_text().replace("&#39;", "'")

    accepted = call("check", finished.output, "--accept")
    assert (accepted.returncode, accepted.stdout.splitlines()[0][:14]) == (0, "work: accepted")
    assert "accepted at" in call("check", finished.output).stdout
    assert call("resume", finished.output).returncode == 0


@pytest.fixture
def killed(tmp_path):
    """A run that was killed in its fourth trial or later, before SQLite folded its log into the ledger."""
    wide = TEXT.replace("trials = 6", "trials = 400").replace("b = [1, 2]", f"b = {list(range(400))}")
    campaign = Campaign(tmp_path, wide)
    process = campaign.start()
    wait_for(lambda: (campaign.output / "work" / "trials" / "4").exists())
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return campaign


def test_a_deleted_write_ahead_log_of_a_killed_run_is_noticed(killed):
    killed.ledger.with_name("ledger.db-wal").unlink()
    for verb in ("check", "resume", "report"):
        done = call(verb, killed.output)
        assert done.returncode == 1
        assert "events after that are missing" in done.stdout + done.stderr


def test_a_killed_run_is_in_order(killed):
    done = call("check", killed.output)
    assert done.returncode == 0, done.stdout


def test_what_is_not_an_output_directory_is_refused(tmp_path):
    done = call("check", tmp_path)
    assert (done.returncode, "contains no ledger" in done.stderr) == (1, True)
