"""`loopwright reread`, and which directories of trials `keep` leaves for it."""

import csv
import json

import pytest

import loopwright as lw
from loopwright.ledger.ledger import Ledger


def scenario(pattern: str = "y=([0-9]+)", **workload) -> dict:
    return {
        "name": "s",
        "run": [
            {
                "name": "r",
                "agent": {"type": "grid"},
                "reward": {"type": "identity", "metrics": ["y"]},
                "workload": {
                    "type": "command",
                    "command": "sh -c 'echo y={x} z={z}; exit {x}'",
                    "success": {"exit_codes": [0, 1, 2, 3]},
                    "metrics": {"y": {"regex": pattern}},
                    "args": {"x": [1, 3, 2, 4], "z": {"value": 9}},
                    **workload,
                },
            }
        ],
    }


def test_a_corrected_pattern_is_read_from_the_kept_output(loopwright, tmp_path):
    """Given a wrong pattern, `reread` finds the metrics without running anything, and stores them beside the old."""
    lw.run(scenario("w=([0-9]+)"), tmp_path / "out", progress=False)
    fix = ["--set", "run.workload.metrics.y.regex=y=([0-9]+)"]
    result = loopwright("reread", tmp_path / "out", *fix)
    assert result.returncode == 0, result.stderr
    assert "3 missing → ok" in result.stdout
    assert "best single trial now: 2" in result.stdout
    assert "--write stores" in result.stdout

    for _ in range(2):
        assert loopwright("reread", tmp_path / "out", *fix, "--write", "--json").returncode == 0

    with Ledger.read(tmp_path / "out/r/ledger.db") as ledger:
        assert [trial.outcome for trial in ledger.trials()] == ["ok"] * 3 + ["crashed"]
        revisions = json.loads(ledger.payload(2, "reread"))
    assert [(revision["before"]["outcome"], revision["metrics"]) for revision in revisions] == [
        ("metric_missing", {"y": 3.0})
    ]
    assert loopwright("check", tmp_path / "out").returncode == 0


def test_what_was_reread_is_what_everything_uses(loopwright, tmp_path):
    """Given metrics that were read again and written, best.toml, CSV, report, compare and resume use them."""
    command = "sh -c 'echo y={x} z=-{x}'"
    document = scenario(command=command)
    document["run"][0]["agent"] = {"type": "random", "trials": 8, "seed": 1}
    output = tmp_path / "out"
    lw.run(document, output, progress=False)
    assert "x = 4" in (output / "r/best.toml").read_text()

    fix = ["--set", "run.workload.metrics.y.regex=z=(-[0-9]+)"]
    result = loopwright("reread", output, *fix, "--write")

    assert result.returncode == 0, result.stderr
    assert "8 changed" not in result.stdout  # copies from the cache are not read, but follow
    assert "x = 1" in (output / "r/best.toml").read_text()
    rows = list(csv.DictReader((output / "r/trajectory.csv").read_text().splitlines()))
    assert [float(row["metric.y"]) for row in rows] == [-float(row["action.x"]) for row in rows]
    assert {float(row["reward"]) for row in rows} == {-1.0, -2.0, -3.0, -4.0}
    with Ledger.read(output / "r/ledger.db") as ledger:
        times = [(trial.reserved_at, trial.finished_at) for trial in ledger.trials()]
    assert all(end >= start for start, end in times)
    assert loopwright("check", output).returncode == 0

    wrong = loopwright("reread", output, "--set", "run.workload.metrics.y.regex=w=([0-9])", "--write")
    assert "ok → missing" in wrong.stdout
    assert not (output / "r/best.toml").exists()
    assert loopwright("reread", output, *fix, "--write").returncode == 0
    assert "x = 1" in (output / "r/best.toml").read_text()

    more = ["--set", "run.agent.trials=12", "--accept-changes", *fix]
    result = loopwright("resume", output, *more)
    assert result.returncode == 0, result.stderr
    rows = list(csv.DictReader((output / "r/trajectory.csv").read_text().splitlines()))
    assert len(rows) == 12
    assert {float(row["reward"]) for row in rows} == {-1.0, -2.0, -3.0, -4.0}


@pytest.mark.parametrize(("keep", "kept"), [("all", "1234"), ("best", "2"), ("failed", "4")])
def test_keep_decides_which_directories_stay(tmp_path, keep, kept):
    """Given `keep`, only the directories of all, the best or the failed trials are left."""
    lw.run(scenario(keep=keep), tmp_path / "out", progress=False)
    assert sorted(path.name for path in (tmp_path / "out/r/trials").iterdir()) == list(kept)
