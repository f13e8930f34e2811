"""`loopwright compare` and `loopwright remeasure`: two campaigns side by side, and more measurements of an answer."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from random import Random

import pytest

import loopwright as lw
from loopwright.ledger.ledger import Ledger
from loopwright.selection import recommend, stored_trials
from loopwright.selection.comparison import RecordedRun, compare


def grid(directory):
    """A finished grid over x, whose command reads a file."""
    file = directory / "value"
    file.write_text("7")
    table = {
        "name": "r",
        "agent": {"type": "grid"},
        "reward": {"type": "identity", "metrics": ["y"]},
        "workload": {
            "type": "command",
            "command": f"sh -c 'value=$(cat {file}) && echo y=$(( {{x}} * 10 + value ))'",
            "metrics": {"y": {"regex": "y=([0-9]+)"}},
            "args": {"x": [1, 3, 2]},
        },
    }
    lw.run({"name": "s", "run": [table]}, directory / "out", progress=False)
    return file


def tune(directory, *, bonus=0.0, seed=1, sigma=0.1, values=(1, 2, 3, 4)):
    noise = Random(seed)

    def measure(x, mode):
        return x + bonus + noise.gauss(0, sigma)

    return lw.tune(
        measure,
        {"x": list(values), "mode": ["a", "b"]},
        maximize=True,
        trials=60,
        agent="random",
        seed=seed,
        output=directory,
        in_process=True,
    )


def recorded(output):
    (path,) = output.glob("*/ledger.db")
    with Ledger.read(path) as ledger:
        return RecordedRun.read(ledger)


def test_compare_shows_changes_recommendations_and_common_configurations(loopwright, tmp_path):
    """Given two campaigns that differ by +1 and a candidate, all of that is shown, with intervals."""
    tune(tmp_path / "a")
    tune(tmp_path / "b", bonus=1.0, seed=2, values=(1, 2, 3, 4, 0))

    result = loopwright("compare", "a", "b", "--json")
    assert result.returncode == 0, result.stderr
    event = json.loads(result.stdout)
    changed = {(change["part"], change["name"]) for change in event["changes"]}
    assert {("space", "x"), ("agent", "seed")} <= changed
    assert ("space", "mode") not in changed
    low, high = event["difference"]["interval"]
    assert 0 < low < 1 < high < 2
    assert len(event["common"]) == 8
    assert event["shift"]["mean"] == pytest.approx(1, abs=0.3)

    shown = loopwright("compare", "a", "b").stdout
    assert "recommended in a:   value = " in shown
    assert "8 configurations measured in both" in shown


def test_compare_says_why_recommendations_cannot_be_compared(tmp_path):
    """Given other objectives, a side without a result, or a single measurement, no interval is made up."""
    tune(tmp_path / "a")
    lw.tune(
        lambda x: {"loss": x},
        {"x": [1, 2]},
        minimize="loss",
        trials=2,
        agent="random",
        output=tmp_path / "c",
        in_process=True,
    )
    one, other = recorded(tmp_path / "a"), recorded(tmp_path / "c")
    assert "the objectives differ" in compare(one, other).obstacle
    assert compare(one, other).common == ()
    assert compare(other, other).difference.interval is None
    assert compare(one, one).difference.mean == 0
    assert compare(one, one).changes == ()


def test_a_ledger_that_is_being_written_can_be_compared(loopwright, tmp_path):
    """Given a writer in the middle of a transaction, what is committed is compared, and nothing is written."""
    study = tune(tmp_path / "a")
    ledger = study.output / study.run / "ledger.db"
    with Ledger.open(ledger) as writer:
        connection = sqlite3.connect(ledger)
        connection.execute("BEGIN IMMEDIATE")
        before = ledger.read_bytes()
        assert loopwright("compare", "a", "a").returncode == 0
        assert ledger.read_bytes() == before
        connection.close()
        assert writer.last()[0] == 60


def test_compare_names_what_is_missing(loopwright, tmp_path):
    tune(tmp_path / "a")
    assert "nowhere contains no ledger" in loopwright("compare", "a", "nowhere").stderr
    assert "has no search 'x'. Its searches: measure" in loopwright("compare", "a", "a", "--run", "x").stderr


def test_q02_remeasure_adds_numbered_confirm_rows(loopwright, tmp_path):
    """Given a search that measured once, `remeasure` confirms its answer; a second one adds to it."""
    grid(tmp_path)

    result = loopwright("remeasure", "out", "--again", 3)
    assert result.returncode == 0, result.stderr
    assert "recommended  y = 37 (37 to 37, 3 measurements)" in result.stdout
    assert loopwright("remeasure", "out", "--again", 2, "-q").returncode == 0

    with Ledger.read(tmp_path / "out/r/ledger.db") as ledger:
        rows = [(t.number, t.group, t.repeat, t.action["x"], t.phase) for t in ledger.trials()]
        assert [number for number, *_ in rows] == list(range(1, 14))
        for turn in range(5):  # each round has the answer and, beside it, the baseline
            assert sorted(row[1:] for row in rows[3 + 2 * turn :][:2]) == [
                (1, turn + 1, 1, "confirm"),
                (2, turn + 1, 3, "confirm"),
            ]
        assert len({tuple(row[1] for row in rows[3 + 2 * turn :][:2]) for turn in range(5)}) == 2
        assert len(recommend(stored_trials(ledger), ledger.state("run")).front[0].trials) == 5
    assert "5 measurements" in (tmp_path / "out/r/best.toml").read_text()
    assert loopwright("check", "out").returncode == 0


def test_remeasure_pairs_with_the_baseline_under_the_same_regime_and_noise(loopwright, tmp_path):
    """Given 5 measurements for two finalists and the baseline, which thus lacks the second regime, no pair is mixed."""
    (tmp_path / "regimes.toml").write_text(
        """
name = "regimes"
[[run]]
name = "r"
agent = { type = "random", trials = 18, seed = 3, start = "first" }
confirm = { finalists = 2, share = 0.3 }
noise = { seed = [1, 2, 3] }
reward = { type = "identity", metrics = ["y"] }
env_params = { load = { weights = [0.9, 0.1] } }
[run.workload]
type = "command"
command = "sh -c 'echo y=$((100 * $2 + $0 * (1 + $2) + 5 * $1))' {x} {seed} {load}"
metrics = { y = { regex = "y=(.*)" } }
[run.workload.args]
x = [0, 1, 2, 3]
load = [1, 9]
"""
    )
    assert loopwright("run", "regimes.toml", "--output", "out", "-q").returncode == 0

    assert loopwright("remeasure", "out", "--again", 2, "-q").returncode == 0

    with Ledger.read(tmp_path / "out/r/ledger.db") as ledger:
        fresh = [trial for trial in ledger.trials() if trial.phase == "confirm"]
        added = [(t.noise["seed"], t.regime["load"], t.action["x"]) for t in fresh[-8:]]
        best = recommend(stored_trials(ledger), ledger.state("run"))
    assert sum(trial.action["x"] == 0 for trial in fresh) < sum(trial.action["x"] == 3 for trial in fresh)
    assert all(
        {(load, x) for _, load, x in turn} == {(1, 0), (1, 3), (9, 0), (9, 3)} for turn in (added[:4], added[4:])
    )
    assert all(len({seed for seed, *_ in turn}) == 1 for turn in (added[:4], added[4:]))
    assert best.gain.mean == pytest.approx(0.9 * 6 + 0.1 * 30)
    assert best.gain.interval == pytest.approx((best.gain.mean, best.gain.mean))


def test_a_recommendation_that_fails_when_measured_again_is_replaced(loopwright, tmp_path):
    """Given an answer that crashes when it is measured again, the next best is the answer."""
    grid(tmp_path).unlink()
    loopwright("remeasure", "out", "--again", 1)
    with Ledger.read(tmp_path / "out/r/ledger.db") as ledger:
        assert recommend(stored_trials(ledger), ledger.state("run")).front[0].action["x"] == 2


def test_remeasure_stops_at_ctrl_c_and_resume_completes_what_was_in_flight(loopwright, tmp_path):
    """Given Ctrl-C during a measurement, its number stays, and `resume` measures it once."""
    value = grid(tmp_path)
    value.unlink()
    os.mkfifo(value)  # the commands wait for it
    command = [sys.executable, "-m", "loopwright", "remeasure", "out", "--again", "2"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "out/r/trials/4").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    value.unlink()
    value.write_text("7")
    with Ledger.read(tmp_path / "out/r/ledger.db") as ledger:
        assert [(t.number, t.outcome) for t in ledger.trials(after=3)] == [(4, "aborted")]

    assert loopwright("resume", "out", "-q").returncode == 0

    with Ledger.read(tmp_path / "out/r/ledger.db") as ledger:
        assert [(t.number, t.outcome, t.phase) for t in ledger.trials(after=3)] == [(4, "ok", "confirm")]
    assert loopwright("check", "out").returncode == 0


def test_remeasure_refuses_an_unfinished_run(loopwright, tmp_path):
    grid(tmp_path)
    with Ledger.open(tmp_path / "out/r/ledger.db") as ledger:
        ledger.set_state("finished", False)
    result = loopwright("remeasure", "out")
    assert result.returncode == 1
    assert "continue with `loopwright resume" in result.stderr.lower()


def test_race_writes_a_table_a_page_and_json(loopwright, tmp_path):
    tune(tmp_path / "a")
    result = loopwright("race", "a", "--agents", "random", "--seeds", 2, "--trials", 5)
    assert result.returncode == 0, result.stderr
    assert "final regret" in result.stdout
    assert (tmp_path / "a/race.html").is_file()
    lines = loopwright("race", "a", "-a", "random", "--seeds", 2, "--trials", 5, "--json").stdout.splitlines()
    agent, end = map(json.loads, lines)
    assert (agent["agent"], len(agent["curves"]), len(agent["band"]), end["event"]) == ("random", 2, 5, "race")
    assert "Did you mean 'tpe'?" in loopwright("race", "a", "-a", "tpee").stderr
