"""Small trainings over a batch workload: budget, evaluation, checkpoints and warm start."""

import os
import signal
import sqlite3
import subprocess
import sys
from html import unescape
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.agents.rl.scenarios import (
    LISTS,
    RANGE,
    batch_scenario,
    numbers,
    resume,
    rows,
    state,
    timesteps,
    train,
    train_and_interrupt,
    updates,
    write_scenario,
)
from tests.envs.helpers import search_env, wait_until

from loopwright.agents.rl.agent import PpoConfig
from loopwright.agents.rl.learner import LearnerContext
from loopwright.agents.rl.policy import act
from loopwright.agents.rl.sb3 import Sb3Learner
from loopwright.agents.rl.training import warm_start_pairs
from loopwright.agents.rl.vec_envs import SlotVecEnv
from loopwright.core.outcome import Outcome
from loopwright.envs.gym.adapter import Driver
from loopwright.ledger.check import accept_ledger

pytestmark = pytest.mark.filterwarnings("ignore:You are trying to run PPO on the GPU")


@pytest.mark.parametrize(
    ("agent", "args"),
    [
        ('type = "ppo", trials = 60, rollout = 16', LISTS),
        ('type = "ppo", trials = 60, rollout = 16', RANGE),
        ('type = "a2c", trials = 60', LISTS),
        ('type = "dqn", trials = 60', LISTS),
        ('type = "sac", trials = 40', RANGE),
    ],
)
def test_every_algorithm_trains_evaluates_and_saves(tmp_path, agent, args):
    assert train(tmp_path, batch_scenario(agent, args)) == 0
    budget = 40 if "sac" in agent else 60
    assert numbers(tmp_path) == list(range(1, budget + 1))
    evaluation = state(tmp_path, "policy")["regimes"]
    assert [row["regime"] for row in evaluation] == [{"wind": 0}, {"wind": 1}]
    assert [n for row in evaluation for side in ("policy", "static") for n in row[side]["trials"]] == list(
        range(budget - 3, budget + 1)
    )
    for row in evaluation:
        assert act(tmp_path / "out" / "r" / "policy", row["regime"]) == row["policy"]["action"]
    assert (tmp_path / "out" / "r" / "env.csv").exists()


def test_a_policy_learns_the_best_action_of_each_regime(tmp_path):
    agent = 'type = "ppo", trials = 800, rollout = 64, learning_rate = 0.005, seed = 1'
    assert train(tmp_path, batch_scenario(agent)) == 0
    evaluation = state(tmp_path, "policy")["regimes"]
    assert [row["policy"]["action"]["x"] for row in evaluation] == [1, 3]
    assert [row["policy"]["reward"] for row in evaluation] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("agent", "run", "parallel"),
    [
        ('type = "ppo", trials = 50, rollout = 16', "repeats = 2", 1),
        ('type = "ppo", trials = 51, rollout = 16', "", 4),
        ('type = "a2c", trials = 50', "repeats = 2", 3),
        ('type = "dqn", trials = 31', "", 3),
    ],
)
def test_the_budget_is_never_exceeded(tmp_path, agent, run, parallel):
    assert train(tmp_path, batch_scenario(agent, run=run, parallel=parallel)) == 0
    budget = int(agent.split("trials = ")[1].split(",")[0])
    repeats = 2 if run else 1
    assert budget - parallel * repeats < len(numbers(tmp_path)) <= budget
    assert numbers(tmp_path) == list(range(1, len(numbers(tmp_path)) + 1))


def test_resuming_a_finished_training_adds_no_trial(tmp_path):
    assert train(tmp_path, batch_scenario('type = "ppo", trials = 40, rollout = 16')) == 0
    before, evaluation = numbers(tmp_path), state(tmp_path, "policy")["regimes"]
    assert resume(tmp_path) == 0
    assert numbers(tmp_path) == before
    assert state(tmp_path, "policy")["regimes"] == evaluation


def test_an_interrupted_evaluation_is_completed_on_resume(tmp_path):
    assert train(tmp_path, batch_scenario('type = "ppo", trials = 40, rollout = 16')) == 0
    evaluation = state(tmp_path, "policy")["regimes"]
    with sqlite3.connect(tmp_path / "out" / "r" / "ledger.db") as connection:  # killed before its last two trials
        connection.execute("DELETE FROM trials WHERE number > 38")
        connection.execute("DELETE FROM payloads WHERE trial > 38")
    connection.close()
    accept_ledger(tmp_path / "out" / "r" / "ledger.db")
    assert resume(tmp_path) == 0
    assert numbers(tmp_path) == list(range(1, 41))
    assert state(tmp_path, "policy")["regimes"] == evaluation


def test_failed_trials_have_no_reward(tmp_path):
    args = 'x = [0, 1]\nmode = ["good", "bad"]'
    assert train(tmp_path, batch_scenario('type = "a2c", trials = 40', args, more="")) == 0
    failed = [row for row in rows(tmp_path) if row.outcome is Outcome.CRASHED]
    assert failed
    assert all(row.reward is None and not row.metrics for row in failed)


@pytest.mark.parametrize(
    ("agent", "run", "parallel"),
    [
        ('type = "ppo", trials = 40', "", 1),
        ('type = "ppo", trials = 60', "repeats = 5", 1),
        ('type = "ppo", trials = 12', "", 4),
        ('type = "a2c", trials = 30', "repeats = 3", 2),
        ('type = "dqn", trials = 8', "", 1),
        ('type = "dqn", trials = 28', "repeats = 2", 2),
    ],
)
def test_a_successful_training_updates_the_policy(tmp_path, agent, run, parallel):
    assert train(tmp_path, batch_scenario(agent, run=run, parallel=parallel)) == 0
    assert updates(tmp_path, agent.split('"')[1].upper()) > 0


def test_a_failed_training_returns_1_and_the_next_run_starts(tmp_path):
    bad = batch_scenario('type = "ppo", trials = 40, options = { policy_kwargs = { net_arch = "no" } }')
    good = batch_scenario('type = "random", trials = 4', more="", name="good").split("parallel = 1")[1]
    assert train(tmp_path, bad + good) == 1
    assert len(numbers(tmp_path, "good")) == 4
    failure = state(tmp_path, "failure")
    assert failure.startswith("Traceback")
    assert failure.strip().splitlines()[-1] in unescape((tmp_path / "out" / "report.html").read_text())


def test_s12_a_signal_aborts_the_trials_in_flight(tmp_path):
    text = batch_scenario(
        'type = "ppo", trials = 60, rollout = 16', f"{LISTS}\nwait_s = 0.05", run='cache = "off"', parallel=2
    )
    assert train_and_interrupt(tmp_path, text, 10) == 130
    interrupted_rows = rows(tmp_path)
    assert {row.outcome for row in interrupted_rows} <= {Outcome.OK, Outcome.ABORTED}
    assert len(interrupted_rows) < 56
    assert resume(tmp_path) == 0
    assert numbers(tmp_path) == list(range(1, 61))
    assert all(row.outcome is Outcome.OK for row in rows(tmp_path))


@pytest.mark.parametrize(("algorithm", "more"), [("ppo", ", rollout = 16"), ("dqn", "")])
def test_s13_a_killed_training_resumes_with_its_policy(tmp_path, algorithm, more):
    args = f"{LISTS}\nwait_s = 0.004"
    agent = f'type = "{algorithm}", trials = 300, checkpoint_every = 20{more}'
    path = write_scenario(tmp_path, batch_scenario(agent, args, run='cache = "off"'))
    command = [sys.executable, "-m", "loopwright", "run", str(path), "--output", str(tmp_path / "out"), "--quiet"]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: (tmp_path / "out" / "r" / "policy" / "policy.zip").exists(), 60)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    before, timesteps_before = rows(tmp_path), timesteps(tmp_path, algorithm.upper())
    assert 20 <= timesteps_before <= len(before) < 296
    assert resume(tmp_path) == 0
    after = rows(tmp_path)
    assert [row.number for row in after] == list(range(1, 301))
    assert all(row.outcome is Outcome.OK for row in after)
    assert [(row.action, row.draw, row.regime) for row in after[: len(before)]] == [
        (row.action, row.draw, row.regime) for row in before
    ]
    assert timesteps(tmp_path, algorithm.upper()) == timesteps_before + 296 - len(before)


def test_an_incomplete_checkpoint_does_not_replace_the_last_one(tmp_path):
    assert train(tmp_path, batch_scenario('type = "dqn", trials = 40')) == 0
    policy = tmp_path / "out" / "r" / "policy"
    assert {path.name for path in policy.iterdir()} == {"policy.zip", "policy.json", "replay.pkl"}
    for name in (".policy.zip", ".replay.pkl", ".policy.json"):
        (policy / name).write_text("half")
    assert resume(tmp_path) == 0
    assert act(policy, {"wind": 0})["x"] in (0, 1, 2, 3)


REGIMES = {"x": [1, 2, 3, 4], "wind": [0, 1]}


def best_when(x, wind):
    return -abs(x - (4 if wind else 1))


@pytest.fixture
def driver(tmp_path):
    """A driver of a new run, with an earlier run that tried every action under both winds."""
    earlier = search_env(tmp_path / "earlier", REGIMES, best_when, env_params={"wind": {}})
    past = Driver(earlier, "flat")
    for wind in (0, 1):
        for x in (1, 2, 3, 4):
            past.measure({"x": x}, {"wind": wind}, {})
    past.close()
    earlier.book.ledger.close()
    env = search_env(tmp_path / "now", REGIMES, best_when, env_params={"wind": {}})
    env.workload.site = SimpleNamespace(scenario_dir=tmp_path)
    driver = Driver(env, "flat")
    yield driver
    driver.close()


def test_each_imitated_trial_is_paired_with_its_own_regime(driver):
    pairs = warm_start_pairs(driver, "earlier/run")
    regimes_and_actions = {
        (int(observation["context"].argmax()), driver.actions.decode(action)["x"]) for observation, action in pairs
    }
    assert regimes_and_actions == {(0, 1), (0, 2), (1, 4), (1, 3)}


def test_imitation_raises_the_probability_of_good_actions(driver):
    context = LearnerContext(driver.env.book, 1, 100, lambda: None, driver.env.book.directory)
    learner = Sb3Learner("PPO", SlotVecEnv(driver, 1), PpoConfig(trials=100), context)
    pairs = warm_start_pairs(driver, "earlier/run")

    def probabilities():
        policy, values = learner.model.policy, []
        with torch.no_grad():
            for observation, action in pairs:
                tensor, _ = policy.obs_to_tensor(observation)
                _, log_probability, _ = policy.evaluate_actions(tensor, torch.as_tensor(np.asarray(action))[None])
                values.append(float(log_probability.exp()))
        return values

    before = probabilities()
    learner.imitate(pairs)
    assert all(after > early for after, early in zip(probabilities(), before, strict=True))
    for observation, _ in pairs:
        good = {1, 2} if observation["context"].argmax() == 0 else {3, 4}
        assert driver.actions.decode(learner.act(observation))["x"] in good


def test_a_warm_start_beats_a_cold_one(tmp_path):
    assert train(tmp_path, batch_scenario('type = "random", trials = 40')) == 0
    (tmp_path / "out").rename(tmp_path / "earlier")
    agent = 'type = "ppo", trials = 40, rollout = 16, warm_start = "earlier/r"'
    assert train(tmp_path, batch_scenario(agent)) == 0
    mean_of_uniform_policy = -1.25
    assert np.mean([row.reward.value for row in rows(tmp_path)[:36]]) > mean_of_uniform_policy
