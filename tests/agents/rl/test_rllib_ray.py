"""Trainings with RLlib, each in its own process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.agents.rl.scenarios import (
    batch_scenario,
    live_scenario,
    numbers,
    rows,
    write_scenario,
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_rllib_uses_its_whole_budget_resumes_and_acts(tmp_path, algorithm):
    agent = f'type = "{algorithm}", library = "rllib", trials = 100, rollout = 36, checkpoint_every = 30'
    text = batch_scenario(agent)
    path = write_scenario(tmp_path, text)
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
    path = write_scenario(tmp_path, live_scenario('type = "ppo", library = "rllib", trials = 200, rollout = 64'))
    done = loopwright("run", path, "--output", tmp_path / "out", "--quiet")
    assert done.returncode == 0, done.stderr
    assert numbers(tmp_path) == list(range(1, 201))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_r05_rllib_observes_the_regime_of_a_live_run(tmp_path):
    env_params = "[run.live.args]\ng = [9.8, 1.6]\n[run.env_params.g]"
    agent = 'type = "ppo", library = "rllib", trials = 200, rollout = 64'
    path = write_scenario(tmp_path, live_scenario(agent, "gymnasium:Pendulum-v1", more=env_params))
    done = loopwright("run", path, "--output", tmp_path / "out", "--quiet")
    assert done.returncode == 0, done.stderr
    words = ("--regime", "g=1.6", "--observation", "[1, 0, 0]")
    acted = loopwright("act", tmp_path / "out" / "r" / "policy", *words)
    assert len(json.loads(acted.stdout)) == 1, acted.stderr


BOXED = """
import numpy as np
from gymnasium import spaces
from tests.envs.helpers import LineServer

class Boxed(LineServer):
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
def test_an_rllib_policy_acts_within_the_bounds_of_its_space(tmp_path):
    (tmp_path / "rl_boxed.py").write_text(BOXED)
    path = write_scenario(
        tmp_path, live_scenario('type = "ppo", library = "rllib", trials = 100, rollout = 50', "rl_boxed:Boxed")
    )
    done = loopwright("run", path, "--output", tmp_path / "out", "--quiet")
    assert done.returncode == 0, done.stderr
    assert {row.outcome for row in rows(tmp_path)} == {"ok"}
    acted = loopwright("act", tmp_path / "out" / "r" / "policy", "--observation", "[0, 0]")
    assert all(3.0 <= number <= 5.0 for number in json.loads(acted.stdout)), acted.stderr


def loopwright(*words: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "loopwright", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path.cwd())


PARTS = """
import numpy as np
from gymnasium import spaces
from tests.envs.helpers import LineServer

class Parts(LineServer):
    action_space = spaces.Dict({"move": spaces.Discrete(3), "push": spaces.Box(0.0, 2.0, (1,), np.float32)})

    def __init__(self):
        super().__init__()

    def step(self, action):
        assert self.action_space.contains(action), action
        return super().step(action["move"])

class Pair(Parts):
    action_space = spaces.Tuple((spaces.Discrete(3), spaces.Discrete(2)))

    def step(self, action):
        assert self.action_space.contains(action), action
        return LineServer.step(self, action[0])
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["Parts", "Pair"])
def test_g14_rllib_trains_on_dict_and_tuple_actions_as_they_are(tmp_path, name):
    (tmp_path / "rl_parts.py").write_text(PARTS)
    agent = 'type = "ppo", library = "rllib", trials = 100, rollout = 50'
    path = write_scenario(tmp_path, live_scenario(agent, f"rl_parts:{name}"))
    done = loopwright("run", path, "--output", tmp_path / "out", "--quiet")
    assert done.returncode == 0, done.stderr
    assert [str(row.outcome) for row in rows(tmp_path)] == ["ok"] * 100
    acted = loopwright("act", tmp_path / "out" / "r" / "policy", "--observation", "[0, 0]")
    assert len(json.loads(acted.stdout)) == 2, acted.stderr


SEES = """
import numpy as np
from gymnasium import spaces
from tests.envs.helpers import LineServer

IMAGE = spaces.Box(0, 255, (42, 42, 3), np.uint8)

class Named(LineServer):
    observation_space = spaces.Dict({"eye": IMAGE, "state": spaces.Dict({"keys": spaces.Discrete(3)})})
    action_space = spaces.Discrete(2)

    def __init__(self):
        super().__init__()

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), super().reset(seed=seed, options=options)[1]

    def step(self, action):
        return self.observation_space.sample(), *super().step(action)[1:]

class Pair(Named):
    observation_space = spaces.Tuple((spaces.Box(-1, 1, (2,), np.float32), spaces.MultiBinary(2)))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("algorithm", "name", "encoders"),
    [("ppo", "Named", ["TorchCNNEncoder", "TorchMLPEncoder"]), ("dqn", "Pair", ["TorchMLPEncoder"] * 2)],
)
def test_g14_rllib_observes_dict_and_tuple_in_parts_each_with_its_encoder(tmp_path, algorithm, name, encoders):
    from ray.rllib.core.rl_module.rl_module import RLModule  # late: it takes seconds

    from loopwright.agents.rl.rllib_networks import PartsEncoder

    (tmp_path / "rl_sees.py").write_text(SEES)
    agent = f'type = "{algorithm}", library = "rllib", trials = 120, rollout = 50'
    path = write_scenario(tmp_path, live_scenario(agent, f"rl_sees:{name}"))
    done = loopwright("run", path, "--output", tmp_path / "out", "--quiet")
    assert done.returncode == 0, done.stderr
    assert [str(row.outcome) for row in rows(tmp_path)] == ["ok"] * 120
    policy = tmp_path / "out" / "r" / "policy"
    observation = [[0.5, 1], [0, 1]] if name == "Pair" else {"eye": [[[0] * 3] * 42] * 42, "state": {"keys": 2}}
    acted = loopwright("act", policy, "--observation", json.dumps(observation))
    assert json.loads(acted.stdout) in (0, 1), acted.stderr
    module = RLModule.from_checkpoint(policy / "rllib" / "learner_group" / "learner" / "rl_module" / "default_policy")
    parts = next(part for part in module.modules() if isinstance(part, PartsEncoder))
    assert [type(encoder).__name__ for encoder in parts.base_encoders.values()] == encoders
