"""Several isolated environments in one child process: kill -9, a crash in mid-batch, masks; and curves elsewhere."""

import importlib.machinery
import subprocess
import sys
from collections import Counter
from types import ModuleType

import pytest
from tests.agents.rl.scenarios import live_scenario, numbers, resume, rows, timesteps, train, write_scenario
from tests.envs.helpers import wait_until

import loopwright
from loopwright.agents.rl.policy import act
from loopwright.ledger.ledger import Ledger

ENVIRONMENTS = """
import os
import pathlib
import time
import gymnasium
import numpy as np

class Counter(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-100, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, wait_s=0.0, crash_once=""):
        self.wait_s, self.crash_once, self.steps = wait_s, crash_once, 0

    def reset(self, *, seed=None, options=None):
        self.left = 10
        return np.full(1, self.left, np.float32), {}

    def step(self, action):
        time.sleep(self.wait_s)
        self.steps, self.left = self.steps + 1, self.left - 1
        if self.crash_once and self.steps == 25 and not pathlib.Path(self.crash_once).exists():
            pathlib.Path(self.crash_once).touch()
            os.abort()
        return np.full(1, self.left, np.float32), float(action), self.left == 0, False, {}

class Masked(Counter):
    def action_masks(self):
        return np.array([self.left % 2 == 0, self.left % 2 == 1, False])

    def step(self, action):
        assert self.action_masks()[int(action)], "a masked action was chosen"
        return super().step(action)
"""


@pytest.fixture
def environments(tmp_path):
    (tmp_path / "slot_envs.py").write_text(ENVIRONMENTS)
    return tmp_path


@pytest.mark.slow
def test_s13_a_run_with_eight_isolated_environments_survives_kill_9(environments):
    tmp_path = environments
    agent = 'type = "ppo", trials = 800, rollout = 64, checkpoint_every = 64'
    more = "envs = 8\n[run.live.args]\nwait_s = 0.0005"
    path = write_scenario(tmp_path, live_scenario(agent, "slot_envs:Counter", more, isolate=True))
    command = [sys.executable, "-m", "loopwright", "run", str(path), "--output", str(tmp_path / "out"), "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: (tmp_path / "out" / "r" / "policy" / "policy.zip").exists(), 60)
    finally:
        process.kill()
        process.wait()
    before = numbers(tmp_path)
    assert timesteps(tmp_path) <= len(before) < 800, "the steps behind a checkpoint are in the ledger before it"
    assert resume(tmp_path) == 0
    after = rows(tmp_path)
    assert [row.number for row in after] == list(range(1, 801))
    assert {str(row.outcome) for row in after} == {"ok"}


def test_a_child_that_dies_in_mid_batch_costs_one_step_of_each_environment(environments):
    tmp_path = environments
    agent = 'type = "ppo", trials = 640, rollout = 64'
    more = f'envs = 8\n[run.live.args]\ncrash_once = "{tmp_path / "crashed"}"'
    assert train(tmp_path, live_scenario(agent, "slot_envs:Counter", more, isolate=True)) == 0
    assert numbers(tmp_path) == list(range(1, 641))
    outcomes = Counter(str(row.outcome) for row in rows(tmp_path))
    assert outcomes == {"ok": 632, "crashed": 8}
    assert all("SIGABRT" in row.reason for row in rows(tmp_path) if str(row.outcome) == "crashed")


@pytest.mark.parametrize("isolate", [False, True])
def test_masks_of_a_method_reach_the_policy(environments, isolate):
    """The policy, in training and evaluation, and the random baseline choose no masked action."""
    tmp_path = environments
    agent = 'type = "maskable_ppo", trials = 256, rollout = 64, evaluate = { every = 128, episodes = 2 }'
    assert train(tmp_path, live_scenario(agent, "slot_envs:Masked", "envs = 2", isolate=isolate)) == 0
    assert {str(row.outcome) for row in rows(tmp_path)} == {"ok"}
    assert act(tmp_path / "out" / "r" / "policy" / "best", {}, [0.0]) in (0, 1, 2)
    with Ledger.read(tmp_path / "out" / "r" / "ledger.db") as ledger:
        assert len(ledger.state("baseline 0") or ()) == 2


def test_curves_are_written_to_wandb_and_mlflow(tmp_path, monkeypatch):
    logged = {"wandb": [], "mlflow": []}
    for name in logged:
        fake = ModuleType(name)
        fake.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, fake)
    run = ModuleType("run")
    run.log, run.finish = lambda numbers, step: logged["wandb"].append((step, numbers)), lambda: None
    run.info = ModuleType("info")
    run.info.run_id = "1"
    sys.modules["wandb"].init = lambda **_: run
    mlflow = sys.modules["mlflow"]
    mlflow.start_run, mlflow.end_run = lambda **_: run, lambda: None
    mlflow.log_metrics = lambda numbers, step: logged["mlflow"].append((step, numbers))
    agent = 'type = "ppo", trials = 200, rollout = 64, log = ["wandb", "mlflow"]'
    assert train(tmp_path, live_scenario(f"{agent}, evaluate = {{ every = 100, episodes = 2 }}")) == 0
    assert logged["wandb"] == logged["mlflow"]
    names = {name for _, numbers in logged["wandb"] for name in numbers}
    assert {"train/loss", "train/approx_kl", "train/explained_variance", "eval/return"} <= names
    steps = [step for step, _ in logged["wandb"]]
    assert steps == sorted(steps)
    assert steps[-1] == 200


@pytest.mark.parametrize("isolate", [False, True])
def test_the_options_of_a_vectors_reset_reach_every_server(environments, isolate):
    source = ENVIRONMENTS.replace("self.left = 10", 'self.left = (options or {}).get("left", 10)')
    (environments / "slot_options.py").write_text(source)
    agent = 'type = "ppo", trials = 100, rollout = 64'
    path = write_scenario(environments, live_scenario(agent, "slot_options:Counter", isolate=isolate))
    env = loopwright.make(path, num_envs=3)
    try:
        assert env.reset(options={"left": 4})[0].tolist() == [[4.0]] * 3
        assert env.reset()[0].tolist() == [[10.0]] * 3
    finally:
        env.close()
