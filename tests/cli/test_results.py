"""`loopwright report`, `export` and `list`: the outputs of a run, and the names for a scenario."""

import csv
import json

import pytest

from loopwright.ledger.ledger import Ledger


@pytest.fixture
def finished(loopwright, scenario, tmp_path):
    """A run with a drawn parameter, some of whose trials failed."""
    path = scenario(
        command="sh -c 'test {x} != 2 && echo y={x}' {mode}",
        agent='{ type = "random", trials = 12, seed = 3 }',
        more="[run.env_params.mode]",
    )
    loopwright("run", path, "-o", "out", "-q")
    return tmp_path / "out"


def test_exports_match_the_ledger(loopwright, finished):
    for name in ("trajectory.csv", "env.csv"):
        (finished / "first" / name).unlink()
    csvs = loopwright("export", finished)
    parquet = loopwright("export", finished, "--format", "parquet")
    assert (csvs.returncode, parquet.returncode) == (0, 0), csvs.stderr + parquet.stderr
    assert csvs.stdout.split() == [str(finished / "first" / name) for name in ("trajectory.csv", "env.csv")]
    with Ledger.read(finished / "first" / "ledger.db") as ledger:
        trials = list(ledger.trials())
    assert {trial.outcome for trial in trials} == {"ok", "crashed"}
    with (finished / "first" / "trajectory.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["trial"]) for row in rows] == [trial.number for trial in trials]
    assert [json.loads(row["action"]) for row in rows] == [trial.action for trial in trials]
    assert [row["reward"] for row in rows] == [str(trial.reward.value) if trial.reward else "" for trial in trials]
    with (finished / "first" / "env.csv").open(newline="") as file:
        drawn_rows = list(csv.DictReader(file))
    assert [(int(row["trial"]), row["mode"]) for row in drawn_rows] == [(t.number, t.regime["mode"]) for t in trials]
    _same_in_parquet(finished / "first" / "trials.parquet", trials)


def _same_in_parquet(path, trials):
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = parquet.read_table(path).to_pylist()
    assert [row["trial"] for row in rows] == [trial.number for trial in trials]
    assert [row["action.x"] for row in rows] == [trial.action["x"] for trial in trials]
    assert [row["env_params.mode"] for row in rows] == [trial.regime["mode"] for trial in trials]
    assert [row["reward"] for row in rows] == [trial.reward.value if trial.reward else None for trial in trials]
    assert [row["outcome"] for row in rows] == [trial.outcome for trial in trials]


def test_the_report_is_rebuilt_from_the_ledgers_alone(loopwright, finished):
    (finished / "report.html").unlink()
    (finished / "scenario.toml").unlink()
    done = loopwright("report", finished)
    assert done.returncode == 0, done.stderr
    assert (finished / "report.html").is_file()
    assert done.stdout.strip() == str(finished / "report.html")


def test_a_report_that_cannot_be_written_is_not_named_as_the_result(loopwright, finished):
    (finished / "report.html").unlink(missing_ok=True)
    (finished / "report.html").mkdir()
    try:
        done = loopwright("report", finished)
    finally:
        (finished / "report.html").rmdir()
    assert (done.returncode, done.stdout) == (1, "")
    assert "report.html" in done.stderr


@pytest.mark.parametrize("verb", ["report", "export"])
def test_a_directory_without_a_ledger_exits_with_1(loopwright, verb, tmp_path):
    done = loopwright(verb, tmp_path)
    assert done.returncode == 1
    assert "contains no ledger" in done.stderr


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("agents", ["grid", "random", "tpe", "gp", "cmaes", "nsga2", "bandit"]),
        ("workloads", ["command", "python"]),
        ("rewards", ["identity", "negative", "inverse", "weighted", "expression"]),
    ],
)
def test_a_list_has_every_name_with_its_description(loopwright, family, names):
    lines = loopwright("list", family).stdout.splitlines()
    entries = [line.split(maxsplit=1) for line in lines if not line.startswith("   ")]
    assert set(names) <= {entry[0] for entry in entries}
    assert all(len(entry) == 2 for entry in entries)


def test_an_unknown_verb_exits_with_2(loopwright):
    assert loopwright("rum").returncode == 2


def test_help_and_version(loopwright):
    assert "dry-run" in loopwright("--help").stdout
    assert loopwright("--version").stdout.startswith("loopwright ")


LIVE = """
name = "study"
[[run]]
name = "first"
agent = { type = "a2c", trials = 40 }
reward = { type = "server" }
[run.live]
env_class = "broken:Broken"
"""
BROKEN = """
import gymnasium, numpy

class Broken(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        return numpy.zeros(1, numpy.float32), {}

    def step(self, action):
        self.steps += 1
        return numpy.zeros(1, numpy.float32), -1.0 if self.steps <= 20 else float("nan"), self.steps % 5 == 0, False, {}
"""


def test_the_end_of_a_live_run_says_what_failed_and_why(loopwright, tmp_path):
    (tmp_path / "live.toml").write_text(LIVE)
    (tmp_path / "broken.py").write_text(BROKEN)
    result = loopwright("run", "live.toml", "-o", "out", "-q")
    assert result.returncode == 1, "its last steps all failed"
    assert "first: 30 steps in 14 episodes, 10 failed" in result.stdout
    assert "mean return of the last 2 episodes: -5 (of the first 2: -5)" in result.stdout
    assert "10 × metric_missing: reward: expected a finite number, got nan" in result.stdout


def test_the_end_of_a_training_says_how_the_policy_did(loopwright, scenario, tmp_path):
    path = scenario(agent='{ type = "a2c", trials = 12, seed = 1 }', more="[run.env_params.mode]")
    result = loopwright("run", path, "-o", "out", "-q")
    assert result.returncode == 0, result.stderr
    assert "policy, measured at the end: " in result.stdout
