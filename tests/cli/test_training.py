"""What `run`, `resume`, `export` and `episodes` print for a training."""

import csv
import json
import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from tests.command_line import run_verb
from tests.survival.campaign import read_all
from tests.trainers.test_curves import scalars

from loopwright.ledger.ledger import Ledger
from loopwright.ledger.steps import Step, Steps
from loopwright.reports.training.progress import TrainingProgress, sparkline

PARTS = """
def letters(first, last):
    return [{"prompt": chr(97 + i), "label": chr(97 + i)} for i in range(first, last)]

def judge(answer):
    return sum(map(ord, answer)) % 5 / 4  # no step teaches nothing
"""
SCENARIO = """
name = "letters"
[[run]]
name = "learn"
agent = { type = "grpo", steps = 3, prompts_per_step = 2, group_size = 4, lr = 1e-3, log = ["tensorboard"] }
[run.engine]
type = "transformers"
model = "tiny"
threads = 1
[run.rollout]
tasks = { type = "python", function = "parts:letters", args = { first = 0, last = 4 } }
loop = { type = "single_turn", sampling = { max_tokens = 4 } }
judger = { type = "python", function = "parts:judge" }
[run.eval]
every = 2
samples = 2
tasks = { type = "python", function = "parts:letters", args = { first = 4, last = 10 } }
"""


def call(directory: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return run_verb(directory, *words)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with the output of a short training, and the JSON lines that it wrote."""
    pytest.importorskip("torch")
    directory = tmp_path_factory.mktemp("letters")
    (directory / "parts.py").write_text(PARTS)
    (directory / "letters.toml").write_text(SCENARIO)
    done = call(directory, "run", "letters.toml", "--output", "out", "--json")
    assert done.returncode == 0, done.stderr
    return directory, [json.loads(line) for line in done.stdout.splitlines()]


def test_every_step_is_a_line_of_json(trained):
    _, events = trained
    steps = [event for event in events if event["event"] == "step"]
    assert [(e["kind"], e["step"]) for e in steps] == [
        ("eval", 0),
        ("train", 1),
        ("train", 2),
        ("eval", 2),
        ("train", 3),
        ("eval", 3),
    ]
    curves = {"reward", "entropy", "mismatch_kl", "grad_norm", "tokens", "rollout_s", "train_s"}
    assert curves <= steps[1]["numbers"].keys()
    assert {"reward", "reward_low", "reward_high", "pass@1", "pass@2"} <= steps[0]["numbers"].keys()
    assert [e["done"] for e in steps] == [0, 1, 2, 2, 3, 3]


def test_the_result_compares_before_and_after(trained):
    directory, events = trained
    (result,) = (event for event in events if event["event"] == "result")
    assert [measured["step"] for measured in result["held_out"]] == [0, 3]
    assert result["change"]["low"] <= result["change"]["mean"] <= result["change"]["high"]
    assert result["steps"] == result["planned_steps"] == 3
    assert (directory / result["policy"] / "model.safetensors").exists()
    # Only what is trained on counts as a rollout here: 3 steps of 2 groups of 4.
    assert result["rollouts"] == 24


def test_a_dry_run_says_how_much_a_training_is(trained):
    directory, _ = trained
    assert "3 steps of 2 prompts in groups of 4" in call(directory, "dry-run", "letters.toml").stdout


def test_a_log_has_a_line_for_each_evaluation_and_the_summary(trained):
    directory, _ = trained
    done = call(directory, "resume", "out")  # nothing is left to train: it reports the existing record
    assert done.returncode == 0
    assert "learn: step 3/3, reward " in done.stdout
    assert "held-out " in done.stdout
    assert "learn: 3 of 3 steps. On 6 held-out tasks the mean reward was" in done.stdout
    assert "pass@2" in done.stdout
    assert "policy: out/learn/policy" in done.stdout
    assert "?" not in done.stdout


def test_tensorboard_event_files_match_the_ledger(trained):
    directory, events = trained
    values = scalars(directory / "out" / "learn" / "tensorboard" / "1")
    for event in events:
        if event["event"] == "step":
            value = values[f"{event['kind']}/reward", event["step"]]
            assert value == pytest.approx(event["numbers"]["reward"], abs=1e-6)


def test_log_lines_appear_above_the_curves(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "parts.py").write_text(PARTS.replace("sum(map(ord, answer)) % 5 / 4", "1.0"))
    (tmp_path / "letters.toml").write_text(SCENARIO)
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "loopwright", "run", "letters.toml", "--output", "out"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    screen = read_all(ours)
    assert process.wait(timeout=60) == 0, screen
    assert re.findall(r"(\x1b\[2K|\n)WARNING: step (\d) skipped", screen) == [("\x1b[2K", f"{n}") for n in (1, 2, 3)]


def test_steps_are_exported_in_three_formats(trained):
    import pyarrow.parquet as pq

    directory, _ = trained
    for kind in ("csv", "parquet", "jsonl"):
        done = call(directory, "export", "out", "--steps", "--format", kind)
        assert done.stdout.strip() == f"out/learn/steps.{kind}"
    folder = directory / "out" / "learn"
    with (folder / "steps.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    table = pq.read_table(folder / "steps.parquet").to_pylist()
    expected = [("train", 1), ("train", 2), ("train", 3), ("eval", 0), ("eval", 2), ("eval", 3)]
    assert [(row["kind"], int(row["step"])) for row in rows] == expected
    assert [(row["kind"], row["step"]) for row in lines] == [(row["kind"], row["step"]) for row in table] == expected
    assert [float(row["reward"]) for row in rows] == [row["reward"] for row in table]
    assert rows[0]["pass@1"] == ""
    assert table[0]["pass@1"] is None


def test_steps_are_not_rows(trained):
    directory, _ = trained
    for words in (("--rows", "--format", "jsonl"), ("--format", "verl")):
        done = call(directory, "export", "out", "--steps", *words)
        assert done.returncode == 2
        assert "--steps are exported as csv, parquet or jsonl" in done.stderr


def test_an_evaluation_is_marked_as_one(trained):
    directory, _ = trained
    output = call(directory, "episodes", "out", "--trial", "1").stdout
    assert "evaluation after step 0" in output


# -- the progress of a training, without one ------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path):
    with Ledger.create(tmp_path / "ledger.db") as ledger:
        ledger.set_state("run", {"rollout": {"loop": {}}, "agent": {"type": "grpo", "steps": 10}})
        yield ledger


def step(number: int, at: float = 0.0, **numbers) -> Step:
    return Step(number, at, {"reward": number / 10, "tokens": 300.0, "rollout_s": 2.0, "train_s": 1.0, **numbers})


def test_a_line_has_the_step_the_rewards_and_the_speed(ledger):
    progress = TrainingProgress.of(ledger)
    assert progress.parts() == ["step 0/10"]
    progress.add("eval", Step(0, 0.0, {"reward": 0.25, "reward_low": 0.125, "reward_high": 0.5}))
    for n in (1, 2, 3):
        progress.add("train", step(n, entropy=1.5, kl=None))
    assert progress.parts() == [
        "step 3/10",
        "reward ▁▅█ 0.3",
        "held-out 0.25 (95 %: 0.125 … 0.5)",
        "entropy 1.5",
    ]
    assert progress.speed() == ["100 tokens/s"]
    assert progress.notes() == []
    progress.add("train", step(4, short=2.0, control_rate=0.5))
    assert progress.notes() == ["2 short groups", "possible reward hacking"]


def test_time_left_counts_only_steps_since_a_resume(ledger):
    Steps(ledger).add("train", step(1, at=0.0))
    progress = TrainingProgress.of(ledger)
    assert progress.seconds_left is None
    progress.add("train", step(2, at=5000.0))
    assert progress.seconds_left == 3.0 * 8
    progress.add("train", step(3, at=5010.0))
    assert progress.seconds_left == 10.0 * 7


def test_steps_repeated_after_a_crash_replace_the_earlier_ones(ledger):
    for n in (1, 2, 3, 4):
        Steps(ledger).add("train", step(n))
    progress = TrainingProgress.of(ledger)
    for n, reward in ((0, 0.1), (4, 0.5), (0, 0.2)):
        progress.add("eval", Step(n, 0.0, {"reward": reward}))
    progress.add("train", step(3, reward=9.0))
    assert progress.done == 3
    assert "held-out 0.5" in progress.parts()[2]
    assert "9" in progress.parts()[1]


def test_a_run_without_training_has_no_training_progress(ledger):
    ledger.set_state("run", {"rollout": {"loop": {}}, "agent": {"type": "collect", "trials": 5}})
    assert TrainingProgress.of(ledger) is None


@pytest.mark.parametrize(
    ("values", "sparkline_text"),
    [([1.0], "▁"), ([2.0, 2.0], "▁▁"), ([0.0, 1.0], "▁█"), ([-1.0, 0.0, 1.0], "▁▅█"), ([0.0] * 8 + [1.0] * 8, "▁▁██")],
)
def test_a_sparkline_spans_the_lowest_to_the_highest(values, sparkline_text):
    assert sparkline(values, 4) == sparkline_text


def test_each_curve_has_a_row(ledger):
    from rich.console import Console

    progress = TrainingProgress.of(ledger)
    for n in range(1, 101):
        progress.add("train", step(n, entropy=5 - n / 50))
    progress.add("eval", Step(100, 0.0, {"reward": 0.5, "reward_low": 0.4, "reward_high": 0.6}))
    console = Console(width=120, record=True, file=StringIO())
    console.print(progress.curves())
    lines = [line.split()[0] for line in console.export_text().splitlines()]
    assert lines == ["reward", "held-out", "entropy"]
