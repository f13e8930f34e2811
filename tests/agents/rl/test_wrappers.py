"""Wrappers, time limits and normalisation of live environments."""

import shutil

import pytest
from tests.agents.rl.scenarios import live_scenario, load_error, resume, train

from loopwright.agents.rl.policy import act
from loopwright.ledger.ledger import Ledger

pytestmark = pytest.mark.filterwarnings("ignore:You are trying to run PPO on the GPU")
WRAPPERS = """max_episode_steps = 6
wrappers = [
  "gymnasium.wrappers:FlattenObservation", { type = "gymnasium.wrappers:FrameStackObservation", stack_size = 3 }
]
"""


@pytest.mark.parametrize("isolate", ["false", "true"])
def test_wrappers_and_a_time_limit_apply_wherever_the_environment_runs(tmp_path, isolate):
    text = live_scenario('type = "ppo", trials = 60, rollout = 32', more=WRAPPERS)
    assert train(tmp_path, text.replace("isolate = false", f"isolate = {isolate}")) == 0
    assert act(tmp_path / "out" / "r" / "policy", {}, [[0.0] * 4] * 3) in (0, 1)
    with Ledger.read(tmp_path / "out" / "r" / "ledger.db") as ledger:
        assert {episode["length"] for episode in ledger.episodes()} == {6}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('wrappers = ["gymnasium.wrappers:FlattenObservatoin"]', "has no attribute 'FlattenObservatoin'"),
        (
            'wrappers = [{ type = "gymnasium.wrappers:FrameStackObservation" }]',
            "missing 1 required positional argument",
        ),
        ('wrappers = ["gymnasium.wrappers:NormalizeObservation"]', "use normalize = true in [run.agent]"),
        ('wrappers = ["gymnasium.wrappers:AtariPreprocessing"]', "wrapper 'gymnasium.wrappers:AtariPreprocessing': "),
        ("wrappers = [{ stack_size = 3 }]", "a wrapper is"),
    ],
)
def test_a_wrong_wrapper_is_refused_at_load_time(tmp_path, more, words):
    assert words in load_error(tmp_path, live_scenario('type = "ppo", trials = 60', more=more))


def test_normalisation_is_saved_with_the_policy_and_resumed(tmp_path):
    agent = 'type = "ppo", trials = 120, rollout = 32, normalize = true, evaluate = { every = 60, episodes = 2 }'
    assert train(tmp_path, live_scenario(agent, more="envs = 2")) == 0
    policy = tmp_path / "out" / "r" / "policy"
    assert (policy / "normalize.pkl").exists()
    assert (policy / "best" / "normalize.pkl").exists()
    assert act(policy, {}, [0.0] * 4) in (0, 1)
    with Ledger.read(tmp_path / "out" / "r" / "ledger.db") as ledger:
        assert {trial.reward.value for trial in ledger.trials()} == {1.0}, "the environment's own rewards"
    assert resume(tmp_path) == 0


WIDE = """
import gymnasium
import numpy as np
from tests.envs.helpers import LineServer

class Wide(gymnasium.Env):
    observation_space, action_space = LineServer.observation_space, LineServer.action_space

    def reset(self, *, seed=None, options=None):
        self.left = 5
        return np.zeros(2), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(2), 1.0, self.left == 0, False, {}
"""


def test_observations_of_another_precision_need_a_wrapper_that_converts_them(tmp_path):
    (tmp_path / "rl_wide.py").write_text(WIDE)
    agent = 'type = "ppo", trials = 40, rollout = 16'
    wrapper = 'wrappers = [{ type = "gymnasium.wrappers:DtypeObservation", dtype = "float32" }]'
    assert train(tmp_path, live_scenario(agent, "rl_wide:Wide", wrapper)) == 0
    shutil.rmtree(tmp_path / "out")
    assert train(tmp_path, live_scenario(agent, "rl_wide:Wide")) == 1
