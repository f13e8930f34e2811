import csv
import io

import pytest

from loopwright.ledger.ledger import Ledger
from loopwright.ledger.trial_book import TrialBook
from loopwright.reports.formatting import ends
from loopwright.reports.objective import Objective
from loopwright.reports.progress import RunProgress
from loopwright.reports.search.digest import grouped_failures
from loopwright.reports.search.headline import describe_difference, gain
from loopwright.scenario.dispatch import begin, build
from loopwright.scenario.load import load
from loopwright.selection.estimate import Estimate

SCENARIO = """
name = "own-units"
[[run]]
name = "fast"
agent = { type = "grid" }
reward = { type = "negative", metrics = ["loss"] }
[run.workload]
type = "command"
command = "sh -c 'test {x} != 2 && echo loss={x}'"
metrics = { loss = { regex = 'loss=(\\d+)' } }
[run.workload.args]
x = [1, 2, 3]
"""


@pytest.mark.parametrize(
    ("label", "name", "is_minimised"),
    [
        ("−loss", "loss", True),
        ("-loss", "loss", True),
        ("−a + −b", "a + b", True),
        ("gflops", "gflops", False),
        ("1/seconds", "1/seconds", False),
        ("−a + b", "−a + b", False),
        ("goodput - 0.03 * rtt_ms", "goodput - 0.03 * rtt_ms", False),
        ("", "", False),
    ],
)
def test_a_label_tells_the_metric_and_its_direction(label, name, is_minimised):
    assert Objective.of(label) == Objective(name, is_minimised)


def test_minimised_objectives_are_never_shown_negated():
    objective = Objective.of("−ttft_s")

    assert objective.text(-0.5) == "0.5\u00a0s"
    assert objective.interval((-0.6, -0.4)) == (0.4, 0.6)
    assert objective.text(0.0) == "0\u00a0s"
    assert gain(-2.0, -1.0, objective) == "−50 %"
    difference = Estimate(mean=0.25, interval=(0.1, 0.4), count=5)
    assert describe_difference(difference, objective) == "−0.25\u00a0s (−0.4 to −0.1, 5 measurements)"


def test_s11_trajectory_is_appended_while_the_run_goes(tmp_path):
    (tmp_path / "study.toml").write_text(SCENARIO)
    loaded, output = load(tmp_path / "study.toml"), tmp_path / "out"
    output.mkdir()
    begin(loaded, output)
    built = build(loaded, loaded.runs[0], output)
    path = output / "fast" / "trajectory.csv"
    try:
        built.agent.run()
        # Nothing was closed or written at the end: this is what `kill -9` leaves.
        rows = list(csv.DictReader(path.read_text().splitlines()))
    finally:
        built.resources.close()

    assert list(rows[0])[:6] == ["trial", "action", "reward", "observation", "env_params", "outcome"]
    assert sorted((row["action.x"], row["outcome"], row["metric.loss"]) for row in rows) == [
        ("1", "ok", "1.0"),
        ("2", "crashed", ""),
        ("3", "ok", "3.0"),
    ]
    assert all(float(row["wall_s"]) >= 0 for row in rows if row["outcome"] == "ok")
    with Ledger.read(output / "fast" / "ledger.db") as ledger:
        assert len(rows) == sum(1 for _ in ledger.trials())


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (210.9971, 210.9989, "210.9971 to 210.9989"),
        (-210.99813, -210.9960, "−210.9981 to −210.9960"),
        (100000, 100002, "100\u202f000.0 to 100\u202f002.0"),
        (float("-inf"), float("inf"), "-inf to inf"),
        (4.29384, 38.0132, "4.2938 to 38.013"),
        (0.5, 0.5, "0.5 to 0.5"),
        (-1.0, 1.0, "−1 to 1"),
        (0.0, 0.25, "0 to 0.25"),
    ],
)
def test_the_ends_of_a_narrow_interval_can_be_told_apart(low, high, text):
    assert ends(low, high) == text


def test_a_confirmation_in_progress_shows_the_mean_with_the_declared_weights(begin, tmp_path):
    about = {"env_params": {"size": {"weights": [0.9, 0.1]}}, "parameters": {"x": [1, 2], "size": [256, 512]}}
    run = begin("r", **about, objectives=["y"], rollout=None, budget=8)
    for x, calm, storm in ((1, 10.0, 5.0), (2, 9.0, 20.0)):
        run.add({"x": x}, calm, regime={"size": 256}, phase="confirm")
        run.add({"x": x}, storm, regime={"size": 512}, phase="confirm")
    progress = RunProgress(TrialBook("r", tmp_path, run.ledger), io.StringIO())
    assert "best mean y = 10.1 (2 fresh measurements)" in progress.line()


def test_a_confirmation_in_progress_shows_all_objectives(begin, tmp_path):
    run = begin("r", objectives=["rps", "−latency_ms"], rollout=None, budget=8)
    run.add({"x": 1}, 10.0, -3.0, phase="confirm")
    run.add({"x": 1}, 20.0, -4.0, phase="confirm")
    progress = RunProgress(TrialBook("r", tmp_path, run.ledger), io.StringIO())
    assert "best mean rps = 15, latency_ms = 3.5 (2 fresh measurements)" in progress.line()


def test_reasons_that_differ_in_numbers_only_are_one():
    reasons = ("no device 3", "no device 0x7f", "out of memory", "no device 3")
    (group,) = grouped_failures((number, "crashed", "workload", reason) for number, reason in enumerate(reasons, 1))
    assert group.reasons == (("no device 3", (1, 2, 4)), ("out of memory", (3,)))
