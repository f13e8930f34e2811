"""Looking at a group or a task: `episodes` and `export` with --run, --group and --task, and what summaries count."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.export import fill
from tests.command_line import run_verb

from loopwright.core.outcome import Fault, Outcome
from loopwright.core.trial import Result, Trial
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.trial_book import TrialBook
from loopwright.reports.progress import RunProgress
from loopwright.reports.rollout.digest import read_rollouts, rollout_result

PARTS = """
def words():
    return [{"id": f"word-{n}", "prompt": f"Say {n}.", "label": "yes"} for n in range(4)]

calls = 0

def judge(answer, label):
    global calls
    calls += 1
    match calls % 4:
        case 1:
            return float("nan")
        case 2:
            return None
        case 3:
            raise ValueError("no such word")
    return float(answer == label)
"""
SCENARIO = """
name = "words"
[[run]]
name = "{name}"
agent = {{ type = "collect", trials = 24, group_size = 4, batch = 1 }}
[run.rollout]
tasks = {{ type = "python", function = "words:words" }}
loop = {{ type = "single_turn", concurrency = 1 }}
judger = {judger}
[run.engine]
type = "scripted"
slip = 0.0
"""
EXACT = '{ type = "length" }'
MOODY = '{ type = "python", function = "words:judge", retries = 0, breaker = 0 }'
COMMAND = str(Path(sys.executable).with_name("loopwright"))


def call(*arguments, code=0):
    process = run_verb(Path.cwd(), *arguments)
    assert process.returncode == code, process.stderr
    return process


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    directory = tmp_path_factory.mktemp("words")
    (directory / "words.py").write_text(PARTS)
    first, second = (SCENARIO.format(name=name, judger=judger) for name, judger in (("a", EXACT), ("b", MOODY)))
    (directory / "words.toml").write_text(first + second[second.index("[[run]]") :])
    call("run", directory / "words.toml", "--output", directory / "out", "--quiet")
    return directory / "out"


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_episodes_shows_a_group_a_task_or_both(output):
    group = lines(call("episodes", output, "--run", "a", "--group", 3, "--json").stdout)
    assert len(group) == 4
    assert {episode["group"] for episode in group} == {3}
    task = lines(call("episodes", output, "--run", "a", "--task", "word-1", "--json").stdout)
    assert {episode["task"]["id"] for episode in task} == {"word-1"}
    assert len(task) % 4 == 0
    (best,) = lines(call("episodes", output, "--run", "a", "--task", "word-1", "--best", 1, "--json").stdout)
    assert best["trial"] in [episode["trial"] for episode in task]
    assert call("episodes", output, "--run", "a", "--group", 3).stdout.count("word-") >= 4


def test_episodes_of_what_does_not_exist_says_what_does(output):
    assert "the last group is 6" in call("episodes", output, "--run", "a", "--group", 99, code=1).stderr
    assert "Did you mean 'word-1'?" in call("episodes", output, "--run", "a", "--task", "wrd-1", code=1).stderr
    assert "remove --group" in call("episodes", output, "--run", "a", "--trial", 1, "--group", 1, code=2).stderr


def test_export_takes_a_run_a_group_and_a_task(output):
    (output / "b" / "rows.jsonl").unlink(missing_ok=True)
    shown = call("export", output, "--rows", "--format", "jsonl", "--run", "a", "--group", 2).stdout
    assert shown.splitlines() == [str(output / "a" / "rows.jsonl")]
    assert {row["group"] for row in lines((output / "a" / "rows.jsonl").read_text())} == {2}
    call("export", output, "--format", "jsonl", "--run", "a", "--task", "word-2")
    assert {e["task"]["id"] for e in lines((output / "a" / "episodes.jsonl").read_text())} == {"word-2"}
    assert "Did you mean 'a'?" in call("export", output, "--run", "aa", code=1).stderr
    assert "choose episodes or rows" in call("export", output, "--group", 1, code=2).stderr


def test_the_trajectory_has_group_task_fault_and_reason(output):
    call("export", output)
    with (output / "b" / "trajectory.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["task"] for row in rows} <= {f"word-{n}" for n in range(4)}
    assert [row["group"] for row in rows] == sorted((row["group"] for row in rows), key=int)
    failed = [row for row in rows if row["outcome"] == "judge_failed"]
    assert {row["fault"] for row in failed} == {"judge"}
    assert all(row["reason"] for row in failed)
    assert not any(row["reason"] for row in rows if row["outcome"] == "ok")


def test_summaries_count_each_reason(output):
    with Ledger.read(output / "b" / "ledger.db") as ledger:
        _, text = rollout_result(read_rollouts(ledger))
    (line,) = [line for line in text if "judge_failed" in line]
    assert line.startswith("18 × judge_failed (fault: judge): 6 × ")
    assert "nan" in line.lower()
    assert "None" in line
    assert "ValueError: no such word" in line


def test_the_hardest_tasks_link_to_their_episodes(output):
    page = (output / "report.html").read_text()
    start = page.index("Hardest tasks")
    anchor = page[start:].split("href='#", 1)[1].split("'", 1)[0]
    assert anchor.startswith("a-trial-")
    assert f"id='{anchor}'" in page


# -- time left ----------------------------------------------------------------------------------------------------


def test_the_time_left_starts_sane(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Ledger.create(tmp_path / "ledger.db") as ledger:
        about = {"rollout": {}, "budget": 640, "objectives": ["reward"], "agent": None, "kind": "rollout"}
        ledger.set_state("run", about)
        progress = RunProgress(TrialBook("r", tmp_path, ledger), sys.stderr)
        now = 60.0  # a model was loaded
        trials = [Trial(number, {}, "", group=1, reserved_at=0.0) for number in range(1, 65)]
        ledger.reserve(trials)
        for trial in trials:
            progress.before(trial)
        now = 61.0
        progress.after(ledger.commit(trials[0], Result(Outcome.LOST, {}, "gone", Fault.INFRA)))
        assert 5 < progress.seconds_left < 30  # 640 rollouts, 64 at a time, a second each


# -- streaming and leftovers --------------------------------------------------------------------------------------


@pytest.fixture
def long_run(tmp_path):
    (tmp_path / "out").mkdir()
    fill(tmp_path / "out" / "r", 3000)
    return tmp_path / "out"


def parts_of(output):
    return list((output / "r").glob(".*.part"))


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_export_that_is_stopped_leaves_nothing_behind(long_run, ending):
    process = subprocess.Popen(
        [COMMAND, "export", str(long_run), "--rows", "--format", "jsonl"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while not parts_of(long_run):
        time.sleep(0.01)
    process.send_signal(ending)
    process.communicate()
    assert process.returncode == 128 + ending
    assert not parts_of(long_run)
    assert not (long_run / "r" / "rows.jsonl").exists()


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_the_next_export_removes_what_a_killed_one_left(long_run, format):
    process = subprocess.Popen([COMMAND, "export", str(long_run), "--rows", "--format", format], stdout=subprocess.PIPE)
    while not parts_of(long_run):
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert parts_of(long_run)
    alive = long_run / "r" / f".rows.{format}.{os.getpid()}.part"  # of another export that is still running
    alive.touch()
    call("export", long_run, "--rows", "--format", format)
    assert parts_of(long_run) == [alive]
    assert (long_run / "r" / f"rows.{format}").exists()
