"""Rollouts that outlive their driver, their actors and their faults: no prompt lost, none counted twice."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections import Counter
from random import Random

import pytest

from loopwright.core.episode import Episode
from loopwright.core.outcome import Fault, Outcome
from loopwright.ledger.ledger import Ledger
from tests.survival.campaign import Campaign, end_of, kill_again_and_again, processes, wait_for

SCENARIO = """
name = "survivor"
[[run]]
name = "work"
agent = {{ type = "collect", trials = {trials}, group_size = 8, seed = 1 }}
[run.rollout]
tasks = {{ type = "python", function = "sums:tasks" }}
loop = {{ type = "single_turn", concurrency = 64, workers = {workers}, cpus = 0.5 }}
judger = {{ type = "python", function = "sums:exact", workers = {judges}, cpus = 0.5, retries = 1 }}
produce = {{ type = "async", over_sample = 0.5 }}
[run.engine]
type = "scripted"
replies = ["1", "2", "3"]
delay_s = {delay_s}
delay_sigma = 1.0
fault_rate = {fault_rate}
"""
SUMS = """
def tasks():
    return [{"prompt": f"{a} of 3", "label": str(a)} for a in (1, 2, 3)] * 20

def exact(answer, label):
    return float(answer == label)
"""


def campaign(directory, *, trials=800, workers=0, judges=0, delay_s=0.05, fault_rate=0.0):
    text = SCENARIO.format(trials=trials, workers=workers, judges=judges, delay_s=delay_s, fault_rate=fault_rate)
    made = Campaign(directory, text)
    (directory / "sums.py").write_text(SUMS)
    return made


def statuses(made):
    connection = sqlite3.connect(made.ledger)
    found = dict(connection.execute("SELECT status, count(*) FROM groups GROUP BY 1"))
    connection.close()
    return found


def survives(tmp_path, kills, within_s, seed, **options):
    calm, stormy = campaign(tmp_path / "calm", **options), campaign(tmp_path / "stormy", **options)
    assert calm.call().code == 0

    hits = kill_again_and_again(stormy, kills, within_s=within_s, seed=seed)

    assert stormy.result() == calm.result()
    assert stormy.numbers() == list(range(1, len(calm.trials()) + 1))
    assert statuses(stormy) == statuses(calm)
    return hits


def test_l09_a_few_kills_of_the_driver_change_nothing(tmp_path):
    assert survives(tmp_path, kills=4, within_s=0.6, seed=3) >= 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_l09_twenty_kills_of_the_driver_change_nothing(tmp_path):
    assert survives(tmp_path, kills=20, within_s=0.8, seed=4, trials=4000) == 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_l09_kills_of_a_driver_on_ray_change_nothing(tmp_path):
    assert survives(tmp_path, kills=3, within_s=16, seed=5, trials=1600, workers=2, judges=1, delay_s=0.3) == 3


def complete(made, size=8):
    """Every group that was begun is there in full, and whatever was lost has a reason and no reward."""
    with Ledger.read(made.ledger) as ledger:
        trials = list(ledger.trials())
        assert [trial.number for trial in trials] == list(range(1, len(trials) + 1))
        scored = Counter(trial.group for trial in trials if trial.reward is not None)
        for trial in trials:
            episode = Episode.from_bytes(ledger.payload(trial.number, "rollout"))
            assert (trial.reward is None) == (trial.outcome not in (Outcome.OK, Outcome.TRUNCATED))
            assert episode.in_baseline == (trial.reward is not None)
            assert trial.outcome is Outcome.OK or trial.reason
    short = [group for group, count in scored.items() if count < size]
    assert len(short) <= 1, "only the budget's end may leave a group short"
    return trials


def test_faults_of_the_engine_cost_no_rollout(tmp_path):
    made = campaign(tmp_path, trials=2000, fault_rate=0.05, delay_s=0.0)
    assert made.call().code == 0
    trials = complete(made)
    assert len(trials) <= 2000
    assert sum(trial.reward is not None for trial in trials) >= 1980


def test_python_o_changes_nothing(tmp_path):
    made = campaign(tmp_path, trials=80, delay_s=0.0)
    command = [sys.executable, "-O", "-m", "loopwright", "run", str(made.scenario), "--output", str(made.output)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    complete(made)


def on_ray(made, mark):
    return made.start(env={**os.environ, "LOOPWRIGHT_TEST_MARK": mark})


def workers_of(mark):
    """The processes of our actors in this test; Ray has helpers of its own by such names, which it does not survive."""
    found = (command.split(maxsplit=1) for environment, command in processes() if mark.encode() in environment)
    return [int(pid) for pid, *words in found if words and words[0].startswith("ray::RayActorHost")]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_l07_killed_actors_cost_nothing_but_time(tmp_path):
    made, mark = campaign(tmp_path, trials=2000, workers=2, judges=1, delay_s=0.3, fault_rate=0.05), uuid.uuid4().hex
    process = on_ray(made, mark)
    wait_for(lambda: made.ledger.exists() and len(made.trials()) > 100)
    random, killed = Random(2), 0
    for _ in range(6):
        time.sleep(0.5)
        if actors := workers_of(mark):
            os.kill(random.choice(actors), signal.SIGKILL)
            killed += 1
    ended = end_of(process)
    assert killed >= 3
    assert ended.code == 0, ended.err
    trials = complete(made)
    assert sum(trial.reward is not None for trial in trials) >= 1900


@pytest.mark.slow
def test_l03_a_pool_that_is_too_large_fails_in_seconds_with_the_numbers(tmp_path):
    made = campaign(tmp_path, workers=500, judges=300)
    ended = made.call()
    assert ended.code != 0
    assert "'loop' asks for 500 workers of 0.5 CPUs" in ended.err
    assert "'judger' asks for 300 workers of 0.5 CPUs" in ended.err
    assert made.trials() == []


def test_l05_a_judge_that_always_fails_gives_no_reward_and_says_why(tmp_path):
    made = campaign(tmp_path, trials=64, delay_s=0.0)
    made.scenario.write_text(
        made.scenario.read_text().replace("retries = 1", "retries = 0, breaker = 4, cooldown_s = 0.1")
    )
    (tmp_path / "sums.py").write_text(SUMS.replace("return float(answer == label)", "raise OSError('no grader today')"))
    ended = made.call()
    assert ended.code == 1
    with Ledger.read(made.ledger) as ledger:
        trials = list(ledger.trials())
    assert {trial.outcome for trial in trials} == {Outcome.JUDGE_FAILED}
    assert {trial.reward for trial in trials} == {None}
    assert all("no grader today" in trial.reason for trial in trials)
    assert set(statuses(made)) == {"failed"}


LOOPS = """
import asyncio
from loopwright.rollouts.loops.base import AgentLoop

class Stubborn(AgentLoop):
    async def run(self, task, session):
        await session.turn(task.messages)
        if task.label == "1":
            await asyncio.Event().wait()
        return session.episode(task)
"""


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_l07_a_loop_that_never_returns_costs_its_own_samples(tmp_path, workers):
    made = campaign(tmp_path / "scenario", trials=96, workers=workers, delay_s=0.0)
    text = made.scenario.read_text().replace('"single_turn"', '"stubborn", deadline_s = 0.5')
    made.scenario.write_text(text)
    package = tmp_path / "package"
    (package / "odd_loops-1.dist-info").mkdir(parents=True)
    (package / "odd_loops-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-loops\nVersion: 1\n")
    (package / "odd_loops-1.dist-info" / "entry_points.txt").write_text(
        "[loopwright.loops]\nstubborn = odd_loops:Stubborn\n"
    )
    (package / "odd_loops.py").write_text(LOOPS)
    process = made.start(env={**os.environ, "PYTHONPATH": str(package)})
    ended = end_of(process)
    assert ended.code == 0, ended.err
    with Ledger.read(made.ledger) as ledger:
        ends = Counter((trial.outcome, trial.fault) for trial in ledger.trials())
    assert ends[Outcome.OK, None] > 0
    assert set(ends) == {(Outcome.OK, None), (Outcome.TIMEOUT, Fault.WORKLOAD)}
