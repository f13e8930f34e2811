"""Small trainings on live servers, and servers that fail, hang or cannot be reached."""

import sys
from html import unescape

import pytest
from tests.agents.rl.scenarios import (
    batch_scenario,
    live_scenario,
    numbers,
    resume,
    rows,
    state,
    timesteps,
    train,
    train_and_interrupt,
)
from tests.envs.helpers import LineServer, live_env
from tests.envs.live.peers import serving

from loopwright.agents.rl.agent import PpoConfig
from loopwright.agents.rl.learner import LearnerContext
from loopwright.agents.rl.policy import act
from loopwright.agents.rl.sb3 import Sb3Learner
from loopwright.envs.gym.adapter import LiveAdapter

pytestmark = pytest.mark.filterwarnings("ignore:You are trying to run PPO on the GPU")


def test_a_live_run_trains_and_acts(tmp_path):
    assert train(tmp_path, live_scenario('type = "ppo", trials = 300, rollout = 64')) == 0
    assert numbers(tmp_path) == list(range(1, 301))
    assert act(tmp_path / "out" / "r" / "policy", {}, [0.0, 0.0, 0.0, 0.0]) in (0, 1)


def test_an_unsupported_action_space_at_an_address_fails_the_run(tmp_path, caplog):
    with serving(
        LineServer, f"unix://{tmp_path}/s"
    ) as server:  # the spaces at an address are known only after connecting
        assert train(tmp_path, at_address(server.address)) == 1
    assert "'sac' supports the action spaces Box; the server has a Discrete" in caplog.text
    assert "Traceback" not in caplog.text
    assert numbers(tmp_path) == []
    assert state(tmp_path, "failure") == "'sac' supports the action spaces Box; the server has a Discrete."


def at_address(address, agent='type = "sac", trials = 50'):
    return live_scenario(agent).replace(
        'env_class = "gymnasium:CartPole-v1"\nisolate = false', f'address = "{address}"'
    )


def test_an_unreachable_server_fails_the_run_and_the_next_run_starts(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("loopwright.envs.live.remote._FIRST_WAIT_S", 60.0)  # no second try
    good = batch_scenario('type = "random", trials = 4', more="", name="good").split("parallel = 1")[1]
    assert train(tmp_path, at_address(f"unix://{tmp_path}/nowhere", 'type = "ppo", trials = 20') + good) == 1
    assert len(numbers(tmp_path, "good")) == 4
    message = f"lost the server at unix://{tmp_path}/nowhere: cannot connect"
    assert message in caplog.text
    assert "Traceback" not in caplog.text
    assert message in state(tmp_path, "failure")
    assert message in unescape((tmp_path / "out" / "report.html").read_text())
    assert state(tmp_path, "run")["live"]
    with serving(LineServer, f"unix://{tmp_path}/nowhere"):
        assert resume(tmp_path) == 0
    assert state(tmp_path, "failure") is None
    assert len(numbers(tmp_path)) == 20
    assert resume(tmp_path) == 0, "a finished run needs no server"
    assert state(tmp_path, "failure") is None


RESETS = """
from tests.envs.helpers import LineServer

class Failing(LineServer):
    def reset(self, **options):
        if self.steps == 25:
            self.steps += 100
            raise {error}
        return super().reset(**options)
"""


@pytest.mark.parametrize("error", ['RuntimeError("no more")', 'SystemExit("no more")'])
def test_a_server_that_raises_in_reset_uses_up_no_number(tmp_path, caplog, error):
    name = f"rl_resets_{error[:5].lower()}"
    (tmp_path / f"{name}.py").write_text(RESETS.format(error=error))
    assert train(tmp_path, live_scenario('type = "ppo", trials = 40, rollout = 16', f"{name}:Failing")) == 1
    assert numbers(tmp_path) == list(range(1, 26))
    message = f"the server failed in 'reset': {error.split('(')[0]}: no more"
    assert message in caplog.text
    assert state(tmp_path, "failure") == f"lost (infra): {message}"
    assert message in unescape((tmp_path / "out" / "report.html").read_text())
    assert timesteps(tmp_path) >= 24
    assert resume(tmp_path) == 0
    assert state(tmp_path, "failure") is None
    assert numbers(tmp_path) == list(range(1, 41))


SERVER = """
from tests.envs.helpers import LineServer

class Dying(LineServer):
    def step(self, action):
        if self.steps == 40:
            raise RuntimeError("the simulator is gone")
        return super().step(action)
"""


def test_a_server_that_dies_is_lost_and_the_run_resumes(tmp_path, caplog):
    (tmp_path / "rl_dying.py").write_text(SERVER)
    text = live_scenario('type = "ppo", trials = 60, rollout = 16', "rl_dying:Dying")
    assert train(tmp_path, text) == 1
    assert "the simulator is gone" in caplog.text
    assert numbers(tmp_path) == list(range(1, 42))
    assert (rows(tmp_path)[-1].outcome, rows(tmp_path)[-1].fault) == ("lost", "infra")
    first = timesteps(tmp_path)
    assert first >= 40
    assert resume(tmp_path) == 0
    assert numbers(tmp_path) == list(range(1, 61))
    assert timesteps(tmp_path) == first + 19


HANGS = """
import time
from tests.envs.helpers import LineServer

class Hanging(LineServer):
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
def test_a_server_that_hangs_is_lost_and_the_run_resumes(tmp_path, caplog, record):
    (tmp_path / "rl_hanging.py").write_text(HANGS.replace("self.steps == 25", "False"))
    more = f'timeout_s = 0.3\nrecord = "{record}"'
    assert train(tmp_path, live_scenario('type = "ppo", trials = 60, rollout = 16', "rl_hanging:Hanging", more)) == 1
    assert "did not respond to 'step' within 0.3 s (timeout_s)" in caplog.text
    last = rows(tmp_path)[-1]
    assert (last.number, last.outcome, last.fault) == (41, "lost", "infra")
    first = timesteps(tmp_path)
    assert resume(tmp_path) == 0
    assert numbers(tmp_path)[-1] == 60
    assert timesteps(tmp_path) == first + 19


def test_a_server_that_hangs_in_reset_fails_the_run_which_resumes(tmp_path, caplog):
    (tmp_path / "rl_reset_hangs.py").write_text(HANGS)
    agent = 'type = "ppo", trials = 60, rollout = 16'
    assert train(tmp_path, live_scenario(agent, "rl_reset_hangs:Hanging", "timeout_s = 0.3")) == 1
    assert "did not respond to 'reset' within 0.3 s (timeout_s)" in caplog.text
    assert numbers(tmp_path) == list(range(1, 26))
    assert resume(tmp_path) == 1  # its next instance hangs in the same place
    assert numbers(tmp_path) == list(range(1, 51))
    assert resume(tmp_path) == 0
    assert numbers(tmp_path) == list(range(1, 61))


def test_s12_a_signal_stops_a_live_training_and_saves_the_policy(tmp_path):
    assert train_and_interrupt(tmp_path, live_scenario('type = "ppo", trials = 1000000, rollout = 64'), 100) == 130
    assert 100 < len(numbers(tmp_path)) < 1000000
    assert timesteps(tmp_path) > 100


def test_s13_live_rows_are_in_the_ledger_before_each_checkpoint(tmp_path):
    env = LiveAdapter(live_env(tmp_path))
    book, checkpoints = env.inner.book, []
    config = PpoConfig(trials=50, rollout=16, checkpoint_every=10)
    learner = Sb3Learner("PPO", env, config, LearnerContext(book, 1, 100, env.inner.flush, tmp_path))
    learner.save = lambda: checkpoints.append((book.step, book.ledger.last()[0]))
    learner.learn(50)
    assert checkpoints == [(n, n) for n in (10, 20, 30, 40, 50)]
    env.close()


INTERRUPTED_SAVE = """
import os, signal, stable_baselines3

class Interrupted(stable_baselines3.PPO):
    saves = []

    def save(self, *args, **kwargs):
        self.saves.append("begin")
        if len(self.saves) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        super().save(*args, **kwargs)
        self.saves.append("end")
"""


def test_a_signal_does_not_interrupt_a_checkpoint(tmp_path):
    (tmp_path / "rl_interrupted.py").write_text(INTERRUPTED_SAVE)
    agent = 'type = "sb3", algorithm = "rl_interrupted:Interrupted", trials = 300, rollout = 50, checkpoint_every = 100'
    assert train(tmp_path, live_scenario(agent)) == 143
    assert sys.modules["rl_interrupted"].Interrupted.saves == ["begin", "end"] * 2, "the checkpoint, then the last one"
    assert timesteps(tmp_path) == len(numbers(tmp_path)) < 300
