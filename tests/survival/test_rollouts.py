"""Rollouts survive kills of their driver and actors, and faults: no prompt is lost, none is counted twice."""

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
from tests.survival.campaign import Campaign, end_of, kill_repeatedly, processes, wait_for

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


def make_campaign(directory, *, trials=800, workers=0, judges=0, delay_s=0.05, fault_rate=0.0):
    text = SCENARIO.format(trials=trials, workers=workers, judges=judges, delay_s=delay_s, fault_rate=fault_rate)
    campaign = Campaign(directory, text)
    (directory / "sums.py").write_text(SUMS)
    return campaign


def statuses(campaign):
    connection = sqlite3.connect(campaign.ledger)
    counts = dict(connection.execute("SELECT status, count(*) FROM groups GROUP BY 1"))
    connection.close()
    return counts


def survives(tmp_path, kills, within_s, seed, **options):
    calm, stormy = make_campaign(tmp_path / "calm", **options), make_campaign(tmp_path / "stormy", **options)
    assert calm.call().code == 0

    hits = kill_repeatedly(stormy, kills, within_s=within_s, seed=seed)

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


def complete(campaign, size=8):
    """Check that every started group is complete, and that lost rollouts have a reason and no reward."""
    with Ledger.read(campaign.ledger) as ledger:
        trials = list(ledger.trials())
        assert [trial.number for trial in trials] == list(range(1, len(trials) + 1))
        scored = Counter(trial.group for trial in trials if trial.reward is not None)
        for trial in trials:
            episode = Episode.from_bytes(ledger.payload(trial.number, "rollout"))
            assert (trial.reward is None) == (trial.outcome not in (Outcome.OK, Outcome.TRUNCATED))
            assert episode.in_baseline == (trial.reward is not None)
            assert trial.outcome is Outcome.OK or trial.reason
    short = [group for group, count in scored.items() if count < size]
    assert len(short) <= 1, "only the last group may be incomplete"
    return trials


def test_engine_faults_lose_no_rollout(tmp_path):
    campaign = make_campaign(tmp_path, trials=2000, fault_rate=0.05, delay_s=0.0)
    assert campaign.call().code == 0
    trials = complete(campaign)
    assert len(trials) <= 2000
    assert sum(trial.reward is not None for trial in trials) >= 1980


def test_python_o_changes_nothing(tmp_path):
    campaign = make_campaign(tmp_path, trials=80, delay_s=0.0)
    command = [
        sys.executable,
        "-O",
        "-m",
        "loopwright",
        "run",
        str(campaign.scenario),
        "--output",
        str(campaign.output),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    complete(campaign)


def on_ray(campaign, mark):
    return campaign.start(env={**os.environ, "LOOPWRIGHT_TEST_MARK": mark})


def workers_of(mark):
    """The processes of our actors in this test; Ray's own helpers have similar names and must not be killed."""
    commands = (command.split(maxsplit=1) for environment, command in processes() if mark.encode() in environment)
    return [int(pid) for pid, *words in commands if words and words[0].startswith("ray::RayActorHost")]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_l07_killed_actors_lose_nothing(tmp_path):
    campaign, mark = (
        make_campaign(tmp_path, trials=2000, workers=2, judges=1, delay_s=0.3, fault_rate=0.05),
        uuid.uuid4().hex,
    )
    process = on_ray(campaign, mark)
    wait_for(lambda: campaign.ledger.exists() and len(campaign.trials()) > 100)
    random, killed = Random(2), 0
    for _ in range(6):
        time.sleep(0.5)
        if actors := workers_of(mark):
            os.kill(random.choice(actors), signal.SIGKILL)
            killed += 1
    result = end_of(process)
    assert killed >= 3
    assert result.code == 0, result.err
    trials = complete(campaign)
    assert sum(trial.reward is not None for trial in trials) >= 1900


@pytest.mark.slow
def test_l03_an_oversized_pool_fails_in_seconds_with_the_numbers(tmp_path):
    campaign = make_campaign(tmp_path, workers=500, judges=300)
    result = campaign.call()
    assert result.code != 0
    assert "'loop' requests 500 workers of 0.5 CPUs" in result.err
    assert "'judger' requests 300 workers of 0.5 CPUs" in result.err
    assert campaign.trials() == []


def test_l05_a_judge_that_always_fails_gives_no_reward_and_says_why(tmp_path):
    campaign = make_campaign(tmp_path, trials=64, delay_s=0.0)
    campaign.scenario.write_text(
        campaign.scenario.read_text().replace("retries = 1", "retries = 0, breaker = 4, cooldown_s = 0.1")
    )
    (tmp_path / "sums.py").write_text(SUMS.replace("return float(answer == label)", "raise OSError('no grader today')"))
    result = campaign.call()
    assert result.code == 1
    with Ledger.read(campaign.ledger) as ledger:
        trials = list(ledger.trials())
    assert {trial.outcome for trial in trials} == {Outcome.JUDGE_FAILED}
    assert {trial.reward for trial in trials} == {None}
    assert all("no grader today" in trial.reason for trial in trials)
    assert set(statuses(campaign)) == {"failed"}


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
def test_l07_a_hanging_loop_loses_only_its_own_samples(tmp_path, workers):
    campaign = make_campaign(tmp_path / "scenario", trials=96, workers=workers, delay_s=0.0)
    text = campaign.scenario.read_text().replace('"single_turn"', '"stubborn", deadline_s = 0.5')
    campaign.scenario.write_text(text)
    package = tmp_path / "package"
    (package / "odd_loops-1.dist-info").mkdir(parents=True)
    (package / "odd_loops-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-loops\nVersion: 1\n")
    (package / "odd_loops-1.dist-info" / "entry_points.txt").write_text(
        "[loopwright.loops]\nstubborn = odd_loops:Stubborn\n"
    )
    (package / "odd_loops.py").write_text(LOOPS)
    process = campaign.start(env={**os.environ, "PYTHONPATH": str(package)})
    result = end_of(process)
    assert result.code == 0, result.err
    with Ledger.read(campaign.ledger) as ledger:
        ends = Counter((trial.outcome, trial.fault) for trial in ledger.trials())
    assert ends[Outcome.OK, None] > 0
    assert set(ends) == {(Outcome.OK, None), (Outcome.TIMEOUT, Fault.WORKLOAD)}
