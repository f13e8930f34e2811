"""RL agents: real trainings, small ones; their budget, their failures, their checkpoints and their evaluation."""

import json
import os
import signal
import subprocess
import sys
import threading
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.agents.trainings import LISTS, RANGE, batch, live, resumed, rows, state, timesteps, trained, written
from tests.envs.live.peers import served
from tests.envs.worlds import Line, wait_until, world
from tests.envs.worlds import live as live_world

from loopwright.agents.rl.agent import PpoConfig
from loopwright.agents.rl.learner import LearnerContext
from loopwright.agents.rl.policy import act
from loopwright.agents.rl.sb3 import Sb3Learner, SlotVecEnv
from loopwright.agents.rl.training import warm_start_pairs
from loopwright.core.errors import ScenarioError
from loopwright.core.outcome import Outcome
from loopwright.envs.gym.adapter import Driver, LiveAdapter
from loopwright.ledger.ledger import Ledger
from loopwright.scenario.load import load

# SB3 says that it runs faster elsewhere, and that a run without a bound on its observations has none.
pytestmark = pytest.mark.filterwarnings("ignore:You are trying to run PPO on the GPU")


def numbers(home, run="r"):
    return [row.number for row in rows(home, run)]


def problem(home, text):
    with pytest.raises(ScenarioError) as raised:
        load(written(home, text))
    return str(raised.value)


# -- trainings ----------------------------------------------------------------------------------------------------


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
    assert trained(tmp_path, batch(agent, args)) == 0
    budget = 40 if "sac" in agent else 60
    assert numbers(tmp_path) == list(range(1, budget + 1))
    told = state(tmp_path, "policy")["regimes"]
    assert [row["regime"] for row in told] == [{"wind": 0}, {"wind": 1}]
    assert [n for row in told for side in ("policy", "static") for n in row[side]["trials"]] == list(
        range(budget - 3, budget + 1)
    )
    for row in told:
        assert act(tmp_path / "out" / "r" / "policy", row["regime"]) == row["policy"]["action"]
    assert (tmp_path / "out" / "r" / "env.csv").exists()


def test_a_policy_learns_what_the_regime_asks_for(tmp_path):
    agent = 'type = "ppo", trials = 800, rollout = 64, learning_rate = 0.005, seed = 1'
    assert trained(tmp_path, batch(agent)) == 0
    told = state(tmp_path, "policy")["regimes"]
    assert [row["policy"]["action"]["x"] for row in told] == [1, 3]
    assert [row["policy"]["reward"] for row in told] == [0.0, 0.0]


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
    assert trained(tmp_path, batch(agent, run=run, parallel=parallel)) == 0
    budget = int(agent.split("trials = ")[1].split(",")[0])
    repeats = 2 if run else 1
    assert budget - parallel * repeats < len(numbers(tmp_path)) <= budget
    assert numbers(tmp_path) == list(range(1, len(numbers(tmp_path)) + 1))


def test_going_on_with_a_finished_training_adds_nothing(tmp_path):
    assert trained(tmp_path, batch('type = "ppo", trials = 40, rollout = 16')) == 0
    before, told = numbers(tmp_path), state(tmp_path, "policy")["regimes"]
    assert resumed(tmp_path) == 0
    assert numbers(tmp_path) == before
    assert state(tmp_path, "policy")["regimes"] == told


def test_an_evaluation_that_was_cut_short_is_completed(tmp_path):
    assert trained(tmp_path, batch('type = "ppo", trials = 40, rollout = 16')) == 0
    told = state(tmp_path, "policy")["regimes"]
    import sqlite3

    with sqlite3.connect(tmp_path / "out" / "r" / "ledger.db") as connection:  # killed before its last two trials
        connection.execute("DELETE FROM trials WHERE number > 38")
        connection.execute("DELETE FROM payloads WHERE trial > 38")
    connection.close()
    assert resumed(tmp_path) == 0
    assert numbers(tmp_path) == list(range(1, 41))
    assert state(tmp_path, "policy")["regimes"] == told


def test_failed_trials_are_told_as_less_and_have_no_reward(tmp_path):
    args = 'x = [0, 1]\nmode = ["good", "bad"]'
    assert trained(tmp_path, batch('type = "a2c", trials = 40', args, more="")) == 0
    failed = [row for row in rows(tmp_path) if row.outcome is Outcome.CRASHED]
    assert failed
    assert all(row.reward is None and not row.metrics for row in failed)


def test_a_live_run_trains_and_acts(tmp_path):
    assert trained(tmp_path, live('type = "ppo", trials = 300, rollout = 64')) == 0
    assert numbers(tmp_path) == list(range(1, 301))
    assert act(tmp_path / "out" / "r" / "policy", {}, [0.0, 0.0, 0.0, 0.0]) in (0, 1)


# -- refused before anything starts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent", "args", "words"),
    [
        ('type = "sac", trials = 90', LISTS, "[run.agent] type: 'sac' needs a range"),
        ('type = "dqn", trials = 90', RANGE, "[run.agent] type: 'dqn' needs lists of at most 4096 points"),
        ('type = "a2c", trials = 90, library = "rllib"', LISTS, "'a2c' needs 'sb3', not 'rllib'"),
        ('type = "ppo", trials = 4', LISTS, "evaluating the policy takes 4 of 4; raise it, or set evaluate = 0"),
        (
            'type = "ppo", trials = 5',
            LISTS,
            "1 of 5 remain for training, but the first update of the policy needs 2",
        ),
        ('type = "ppo", trials = 50, rollout = 64', LISTS, "46 of 50 remain for training, but the first update"),
        ('type = "ppo", trials = 90, count_cached = false', LISTS, "count_cached"),
        (
            'type = "ppo", trials = 90, options = { n_stepz = 8 }',
            LISTS,
            "[run.agent] options: unknown option 'n_stepz' of PPO. Known: learning_rate, n_steps,",
        ),
        ('type = "dqn", trials = 90, options = { clip_range = 1 }', LISTS, "unknown option 'clip_range' of DQN"),
        ('type = "ppo", trials = 90, warm_start = "nowhere"', LISTS, "there is no ledger.db"),
        ('type = "dqn", trials = 90, warm_start = "nowhere"', LISTS, "'dqn' of sb3 cannot imitate"),
        ('type = "ppo"', LISTS, "trials"),
    ],
)
def test_what_cannot_work_is_said_at_load_time(tmp_path, agent, args, words):
    assert words in problem(tmp_path, batch(agent, args))


def test_repeats_take_their_share_of_the_budget(tmp_path):
    agent = 'type = "ppo", trials = 12, seed = 1'
    said = problem(tmp_path, batch(agent, run="repeats = 3"))
    assert "evaluating the policy takes 12 of 12" in said
    said = problem(tmp_path, batch(agent.replace("12", "15"), run="repeats = 3"))
    assert "3 of 15 remain for training, but the first update of the policy needs 6" in said
    assert trained(tmp_path, batch(agent.replace("12", "18"), run="repeats = 3")) == 0
    assert updates(tmp_path) > 0


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
def test_a_policy_that_ends_well_was_updated(tmp_path, agent, run, parallel):
    assert trained(tmp_path, batch(agent, run=run, parallel=parallel)) == 0
    assert updates(tmp_path, agent.split('"')[1].upper()) > 0


def updates(home, algorithm="PPO"):
    import stable_baselines3

    return getattr(stable_baselines3, algorithm).load(home / "out" / "r" / "policy" / "policy.zip")._n_updates


@pytest.mark.slow
def test_rllib_is_asked_for_its_options_too(tmp_path):
    text = batch('type = "ppo", library = "rllib", trials = 90, options = { lamda_ = 1.0, gamma = 0.5 }')
    said = problem(tmp_path, text)
    assert "unknown option 'lamda_' of PPO" in said
    assert "Did you mean 'lambda_'?" in said
    assert "'gamma'" not in said


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("sac", "x = { low = 0, high = 3, dtype = 'int', points = 4 }"),
        ("dqn", "x = { low = 0.0, high = 3.0, points = 4 }"),
    ],
)
def test_a_range_with_points_is_good_for_both(tmp_path, kind, args):
    load(written(tmp_path, batch(f'type = "{kind}", trials = 90', args, more="")))


def test_a_live_policy_starts_cold(tmp_path):
    assert "warm_start: not supported in a live run" in problem(
        tmp_path, live('type = "ppo", trials = 9, warm_start = "x"')
    )


def test_a_live_policy_has_room_for_a_rollout(tmp_path):
    assert "the first update of the policy needs 64" in problem(
        tmp_path, live('type = "ppo", trials = 9, rollout = 64')
    )


# -- failures -----------------------------------------------------------------------------------------------------


def test_a_failing_training_is_a_code_and_the_next_run_starts(tmp_path):
    bad = batch('type = "ppo", trials = 40, options = { gamma = "high" }')
    good = batch('type = "random", trials = 4', more="", name="good").split("parallel = 1")[1]
    assert trained(tmp_path, bad + good) == 1
    assert len(numbers(tmp_path, "good")) == 4
    failure = state(tmp_path, "failure")
    assert failure.startswith("Traceback")
    assert failure.strip().splitlines()[-1] in unescape((tmp_path / "out" / "report.html").read_text())


def test_a_live_algorithm_that_cannot_act_there_is_a_code(tmp_path, caplog):
    with served(Line, f"unix://{tmp_path}/s") as server:  # at an address nothing is known before it is there
        assert trained(tmp_path, at(server.address)) == 1
    assert "'sac' supports the action spaces Box; the server has a Discrete" in caplog.text
    assert "Traceback" not in caplog.text
    assert numbers(tmp_path) == []
    assert state(tmp_path, "failure") == "'sac' supports the action spaces Box; the server has a Discrete."


def at(address, agent='type = "sac", trials = 50'):
    return live(agent).replace('env_class = "gymnasium:CartPole-v1"', f'address = "{address}"')


@pytest.mark.parametrize(
    "path", ["gymnasium:CartPole-v1", "tests.envs.worlds:Line", "rl_late:make", "rl_late:Ordinary"]
)
def test_a_live_algorithm_that_cannot_act_there_is_refused_at_load_time(tmp_path, path):
    (tmp_path / "rl_late.py").write_text(LATE)
    said = problem(tmp_path, live('type = "sac", trials = 50', path))
    assert "[run.agent] type: 'sac' supports the action spaces Box; the server has a Discrete." in said


def test_a_server_that_is_not_there_is_a_code_and_the_next_run_starts(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("loopwright.envs.live.remote._FIRST_WAIT_S", 60.0)  # no second try
    good = batch('type = "random", trials = 4', more="", name="good").split("parallel = 1")[1]
    assert trained(tmp_path, at(f"unix://{tmp_path}/nowhere", 'type = "ppo", trials = 20') + good) == 1
    assert len(numbers(tmp_path, "good")) == 4
    said = f"lost the server at unix://{tmp_path}/nowhere: cannot connect"
    assert said in caplog.text
    assert "Traceback" not in caplog.text
    assert said in state(tmp_path, "failure")
    assert said in unescape((tmp_path / "out" / "report.html").read_text())
    assert state(tmp_path, "run")["live"]
    with served(Line, f"unix://{tmp_path}/nowhere"):
        assert resumed(tmp_path) == 0
    assert state(tmp_path, "failure") is None
    assert len(numbers(tmp_path)) == 20
    assert resumed(tmp_path) == 0, "what is complete needs no server any more"
    assert state(tmp_path, "failure") is None


LATE = """
from gymnasium import Env, spaces

def make():
    from tests.envs.worlds import Line

    return Line()

class Ordinary(Env):
    def __init__(self):
        self.observation_space, self.action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(3)
"""

RESETS = """
from tests.envs.worlds import Line

class Failing(Line):
    def reset(self, **options):
        if self.steps == 25:
            self.steps += 100
            raise {error}
        return super().reset(**options)
"""


@pytest.mark.parametrize("error", ['RuntimeError("no more")', 'SystemExit("no more")'])
def test_a_server_that_fails_in_reset_is_lost_and_costs_no_number(tmp_path, caplog, error):
    name = f"rl_resets_{error[:5].lower()}"
    (tmp_path / f"{name}.py").write_text(RESETS.format(error=error))
    assert trained(tmp_path, live('type = "ppo", trials = 40, rollout = 16', f"{name}:Failing")) == 1
    assert numbers(tmp_path) == list(range(1, 26))
    said = f"the server failed in 'reset': {error.split('(')[0]}: no more"
    assert said in caplog.text
    assert state(tmp_path, "failure") == f"lost (infra): {said}"
    assert said in unescape((tmp_path / "out" / "report.html").read_text())
    assert timesteps(tmp_path) >= 24
    assert resumed(tmp_path) == 0
    assert state(tmp_path, "failure") is None
    assert numbers(tmp_path) == list(range(1, 41))


SERVER = """
from tests.envs.worlds import Line

class Dying(Line):
    def step(self, action):
        if self.steps == 40:
            raise RuntimeError("the simulator is gone")
        return super().step(action)
"""


def test_a_server_that_dies_in_training_is_lost_and_the_run_goes_on_later(tmp_path, caplog):
    (tmp_path / "rl_dying.py").write_text(SERVER)
    text = live('type = "ppo", trials = 60, rollout = 16', "rl_dying:Dying")
    assert trained(tmp_path, text) == 1
    assert "the simulator is gone" in caplog.text
    assert numbers(tmp_path) == list(range(1, 42))
    assert (rows(tmp_path)[-1].outcome, rows(tmp_path)[-1].fault) == ("lost", "infra")
    first = timesteps(tmp_path)
    assert first >= 40
    assert resumed(tmp_path) == 0
    assert numbers(tmp_path) == list(range(1, 61))
    assert timesteps(tmp_path) == first + 19


HANGS = """
import time
from tests.envs.worlds import Line

class Hanging(Line):
    def step(self, action):
        if self.steps == 40:
            time.sleep(600)
        return super().step(action)

    def reset(self, **options):
        if self.steps == 25:
            self.steps += 100
            time.sleep(600)
        return super().reset(**options)
"""


@pytest.mark.parametrize("record", ["steps", "episodes"])
def test_a_server_that_hangs_in_training_is_lost_and_the_run_goes_on_later(tmp_path, caplog, record):
    (tmp_path / "rl_hanging.py").write_text(HANGS.replace("self.steps == 25", "False"))
    more = f'timeout_s = 0.3\nrecord = "{record}"'
    assert trained(tmp_path, live('type = "ppo", trials = 60, rollout = 16', "rl_hanging:Hanging", more)) == 1
    assert "did not respond to 'step' within 0.3 s (timeout_s)" in caplog.text
    last = rows(tmp_path)[-1]
    assert (last.number, last.outcome, last.fault) == (41, "lost", "infra")
    first = timesteps(tmp_path)
    assert resumed(tmp_path) == 0
    assert numbers(tmp_path)[-1] == 60
    assert timesteps(tmp_path) == first + 19


def test_a_server_that_hangs_in_reset_ends_the_run_and_it_goes_on_later(tmp_path, caplog):
    (tmp_path / "rl_reset_hangs.py").write_text(HANGS)
    agent = 'type = "ppo", trials = 60, rollout = 16'
    assert trained(tmp_path, live(agent, "rl_reset_hangs:Hanging", "timeout_s = 0.3")) == 1
    assert "did not respond to 'reset' within 0.3 s (timeout_s)" in caplog.text
    assert numbers(tmp_path) == list(range(1, 26))
    assert resumed(tmp_path) == 1  # its next instance hangs in the same place
    assert numbers(tmp_path) == list(range(1, 51))
    assert resumed(tmp_path) == 0
    assert numbers(tmp_path) == list(range(1, 61))


def interrupted(home, text, count):
    """The exit code of a training that gets a SIGINT after so many trials."""
    path = home / "out" / "r" / "ledger.db"

    def enough():
        if not path.exists():
            return False
        with Ledger.read(path) as ledger:
            return ledger.last()[0] > count

    def interrupt():
        wait_until(enough)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    code = trained(home, text)
    thread.join()
    return code


def test_s12_a_signal_ends_a_live_training_in_good_order(tmp_path):
    assert interrupted(tmp_path, live('type = "ppo", trials = 1000000, rollout = 64'), 100) == 130
    assert 100 < len(numbers(tmp_path)) < 1000000
    assert timesteps(tmp_path) > 100


def test_s12_a_signal_aborts_what_a_batch_training_has_in_flight(tmp_path):
    text = batch('type = "ppo", trials = 60, rollout = 16', f"{LISTS}\nwait_s = 0.05", run='cache = "off"', parallel=2)
    assert interrupted(tmp_path, text, 10) == 130
    ended = rows(tmp_path)
    assert {row.outcome for row in ended} <= {Outcome.OK, Outcome.ABORTED}
    assert len(ended) < 56
    assert resumed(tmp_path) == 0
    assert numbers(tmp_path) == list(range(1, 61))
    assert all(row.outcome is Outcome.OK for row in rows(tmp_path))


# -- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "more"), [("ppo", ", rollout = 16"), ("dqn", "")])
def test_s13_a_killed_training_goes_on_with_its_policy(tmp_path, algorithm, more):
    args = f"{LISTS}\nwait_s = 0.004"
    agent = f'type = "{algorithm}", trials = 300, checkpoint_every = 20{more}'
    path = written(tmp_path, batch(agent, args, run='cache = "off"'))
    command = [sys.executable, "-m", "loopwright", "run", str(path), "--output", str(tmp_path / "out"), "--quiet"]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: (tmp_path / "out" / "r" / "policy" / "policy.zip").exists(), 60)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    before, learned = rows(tmp_path), timesteps(tmp_path, algorithm.upper())
    assert 20 <= learned <= len(before) < 296
    assert resumed(tmp_path) == 0
    after = rows(tmp_path)
    assert [row.number for row in after] == list(range(1, 301))
    assert all(row.outcome is Outcome.OK for row in after)
    assert [(row.action, row.draw, row.regime) for row in after[: len(before)]] == [
        (row.action, row.draw, row.regime) for row in before
    ]
    assert timesteps(tmp_path, algorithm.upper()) == learned + 296 - len(before)


def test_s13_live_rows_are_in_the_ledger_before_each_checkpoint(tmp_path):
    env = LiveAdapter(live_world(tmp_path))
    run, saved = env.inner.book, []
    config = PpoConfig(trials=50, rollout=16, checkpoint_every=10)
    learner = Sb3Learner("PPO", env, config, LearnerContext(run, 1, 100, env.inner.flush))
    learner.save = lambda: saved.append((run.step, run.ledger.last()[0]))
    learner.learn(50)
    assert saved == [(n, n) for n in (10, 20, 30, 40, 50)]
    env.close()


def test_a_checkpoint_cut_short_does_not_hide_the_one_before(tmp_path):
    assert trained(tmp_path, batch('type = "dqn", trials = 40')) == 0
    policy = tmp_path / "out" / "r" / "policy"
    assert {path.name for path in policy.iterdir()} == {"policy.zip", "policy.json", "replay.pkl"}
    for name in (".policy.zip", ".replay.pkl", ".policy.json"):
        (policy / name).write_text("half")
    assert resumed(tmp_path) == 0
    assert act(policy, {"wind": 0})["x"] in (0, 1, 2, 3)


# -- warm start ---------------------------------------------------------------------------------------------------

REGIMES = {"x": [1, 2, 3, 4], "wind": [0, 1]}


def best_when(x, wind):
    return -abs(x - (4 if wind else 1))


@pytest.fixture
def driver(tmp_path):
    """A driver beside an earlier run that tried everything under both winds."""
    earlier = world(tmp_path / "earlier", REGIMES, best_when, env_params={"wind": {}})
    past = Driver(earlier, "flat")
    for wind in (0, 1):
        for x in (1, 2, 3, 4):
            past.measure({"x": x}, {"wind": wind}, {})
    past.close()
    earlier.book.ledger.close()
    env = world(tmp_path / "now", REGIMES, best_when, env_params={"wind": {}})
    env.workload.site = SimpleNamespace(scenario_dir=tmp_path)
    driver = Driver(env, "flat")
    yield driver
    driver.close()


def test_each_imitated_trial_is_seen_under_its_own_regime(driver):
    pairs = warm_start_pairs(driver, "earlier/run")
    told = {(int(seen["context"].argmax()), driver.actions.decode(action)["x"]) for seen, action in pairs}
    assert told == {(0, 1), (0, 2), (1, 4), (1, 3)}


def test_imitation_raises_the_probability_of_what_was_good(driver):
    context = LearnerContext(driver.env.book, 1, 100, lambda: None)
    learner = Sb3Learner("PPO", SlotVecEnv(driver, 1), PpoConfig(trials=100), context)
    pairs = warm_start_pairs(driver, "earlier/run")

    def probability():
        policy, found = learner.model.policy, []
        with torch.no_grad():
            for seen, action in pairs:
                tensor, _ = policy.obs_to_tensor(seen)
                found.append(float(policy.evaluate_actions(tensor, torch.as_tensor(np.asarray(action))[None])[1].exp()))
        return found

    before = probability()
    learner.imitate(pairs)
    assert all(after > early for after, early in zip(probability(), before, strict=True))
    for seen, _ in pairs:
        good = {1, 2} if seen["context"].argmax() == 0 else {3, 4}
        assert driver.actions.decode(learner.act(seen))["x"] in good


def test_a_warm_policy_starts_from_a_recorded_ledger(tmp_path):
    assert trained(tmp_path, batch('type = "random", trials = 40')) == 0
    (tmp_path / "out").rename(tmp_path / "earlier")
    agent = 'type = "ppo", trials = 40, rollout = 16, warm_start = "earlier/r"'
    assert trained(tmp_path, batch(agent)) == 0
    means = [
        np.mean([row.reward.value for row in rows(tmp_path)[:36]]),
        -1.25,  # what a cold policy, which chooses evenly, has
    ]
    assert means[0] > means[1]


# -- RLlib --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_rllib_uses_its_budget_up_goes_on_and_acts(tmp_path, algorithm):
    agent = f'type = "{algorithm}", library = "rllib", trials = 100, rollout = 36, checkpoint_every = 30'
    text = batch(agent)
    path = written(tmp_path, text)
    done = loopwright("run", path, "--output", tmp_path / "out", "--quiet")
    assert done.returncode == 0, done.stderr
    assert numbers(tmp_path) == list(range(1, 101))
    assert loopwright("resume", tmp_path / "out", "--quiet").returncode == 0
    assert len(numbers(tmp_path)) == 100
    acted = loopwright("act", tmp_path / "out" / "r" / "policy", "--regime", "wind=1")
    assert json.loads(acted.stdout)["x"] in (0, 1, 2, 3)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rllib_steps_a_live_run(tmp_path):
    path = written(tmp_path, live('type = "ppo", library = "rllib", trials = 200, rollout = 64'))
    done = loopwright("run", path, "--output", tmp_path / "out", "--quiet")
    assert done.returncode == 0, done.stderr
    assert numbers(tmp_path) == list(range(1, 201))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_r05_rllib_sees_the_regime_of_a_live_run(tmp_path):
    drawn = "[run.live.args]\ngravity = [9.8, 1.6]\n[run.env_params.gravity]"
    path = written(tmp_path, live('type = "ppo", library = "rllib", trials = 200, rollout = 64', more=drawn))
    done = loopwright("run", path, "--output", tmp_path / "out", "--quiet")
    assert done.returncode == 0, done.stderr
    words = ("--regime", "gravity=1.6", "--observation", "[0, 0, 0, 0]")
    acted = loopwright("act", tmp_path / "out" / "r" / "policy", *words)
    assert json.loads(acted.stdout) in (0, 1), acted.stderr


BOXED = """
import numpy as np
from gymnasium import spaces
from tests.envs.worlds import Line

class Boxed(Line):
    observation_space = spaces.Box(-100, 100, (2,), np.float32)
    action_space = spaces.Box(3.0, 5.0, (2,), np.float32)

    def __init__(self):
        super().__init__()

    def step(self, action):
        assert self.action_space.contains(action)
        return super().step(1)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_rllib_policy_acts_within_the_bounds_that_it_was_trained_in(tmp_path):
    (tmp_path / "rl_boxed.py").write_text(BOXED)
    path = written(tmp_path, live('type = "ppo", library = "rllib", trials = 100, rollout = 50', "rl_boxed:Boxed"))
    done = loopwright("run", path, "--output", tmp_path / "out", "--quiet")
    assert done.returncode == 0, done.stderr
    assert {row.outcome for row in rows(tmp_path)} == {"ok"}
    acted = loopwright("act", tmp_path / "out" / "r" / "policy", "--observation", "[0, 0]")
    assert all(3.0 <= number <= 5.0 for number in json.loads(acted.stdout)), acted.stderr


def loopwright(*words: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "loopwright", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path.cwd())
