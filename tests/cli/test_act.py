"""`loopwright act`: a trained policy, applied."""

import json
import sys

import pytest
from stable_baselines3 import A2C
from tests.agents.rl.scenarios import batch_scenario, live_scenario, train

import loopwright
from loopwright.cli import main


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    directory = tmp_path_factory.mktemp("batch")
    assert train(directory, batch_scenario('type = "ppo", trials = 40, rollout = 16')) == 0
    return directory / "out" / "r" / "policy"


@pytest.fixture
def act(monkeypatch, capsys):
    """Calls the verb in this process: a new one would need seconds to import torch."""

    def act(*words: object):
        monkeypatch.setattr(sys, "argv", ["loopwright", "act", *map(str, words)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        output = capsys.readouterr()
        return exit_info.value.code, output.out, output.err

    return act


@pytest.mark.parametrize("wind", [0, 1])
def test_a_policy_answers_for_a_regime(act, policy, wind):
    code, out, _ = act(policy, "--regime", f"wind={wind}")
    assert code == 0
    assert json.loads(out)["x"] in (0, 1, 2, 3)


def test_it_gives_the_same_answer_in_a_separate_process(act, policy, loopwright):
    done = loopwright("act", policy, "--regime", "wind=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == act(policy, "--regime", "wind=1")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "this policy acts on the regime wind; give each parameter with --regime"),
        (("--regime", "wind=0", "--regime", "sea=1"), "acts on the regime wind"),
        (("--regime", "wind=7"), "--regime wind: 7 is not one of 0, 1"),
        (("--regime", "wind=0", "--regime", "wind=1"), "--regime wind is given twice"),
        (("--regime", "wind=0", "--observation", "[0]"), "--observation is for live policies"),
    ],
)
def test_an_unknown_regime_is_named(act, policy, words, message):
    code, _, err = act(policy, *words)
    assert code == 1
    assert message in err


def test_a_regime_without_a_value_is_a_usage_error(loopwright, policy):
    done = loopwright("act", policy, "--regime", "wind")
    assert (done.returncode, "Write --regime NAME=VALUE" in done.stderr) == (2, True)


def test_a_missing_policy_is_reported(act, tmp_path):
    code, _, err = act(tmp_path)
    assert code == 1
    assert "no policy in" in err


def test_an_incomplete_policy_is_reported(act, policy, tmp_path):
    (tmp_path / "policy.json").write_text((policy / "policy.json").read_text())
    code, _, err = act(tmp_path, "--regime", "wind=0")
    assert code == 1
    assert "is incomplete" in err


def test_a_live_policy_answers_for_an_observation(act, tmp_path):
    assert train(tmp_path, live_scenario('type = "a2c", trials = 40')) == 0
    policy = tmp_path / "out" / "r" / "policy"
    assert json.loads(act(policy, "--observation", "[0, 0, 0, 0]")[1]) in (0, 1)
    assert "give --observation" in act(policy)[2]
    for observation in ("[0, 0]", '["a"]', "x"):
        code, _, err = act(policy, "--observation", observation)
        assert code == 1
        assert "is not an observation of this policy" in err


def test_a_live_policy_with_a_regime_needs_both(act, tmp_path):
    env_params = "[run.live.args]\ng = [9.8, 1.6]\n[run.env_params.g]"
    text = live_scenario('type = "a2c", trials = 40', "gymnasium:Pendulum-v1", more=env_params)
    assert train(tmp_path, text) == 0
    policy = tmp_path / "out" / "r" / "policy"
    code, out, _ = act(policy, "--regime", "g=1.6", "--observation", "[1, 0, 0]")
    assert code == 0
    assert len(json.loads(out)) == 1
    for words, message in (
        (("--regime", "g=1.6"), "give --observation with one of Box("),
        (
            ("--observation", "[1, 0, 0]"),
            "this policy acts on the regime g; give each parameter with --regime",
        ),
        (("--regime", "g=2", "--observation", "[1, 0, 0]"), "--regime g: 2 is not one of 9.8, 1.6"),
    ):
        code, _, err = act(policy, *words)
        assert code == 1
        assert message in " ".join(err.split())


OWN = """
from loopwright import ObsLeafDescriptor
from loopwright.envs import SearchEnv

class Windy(SearchEnv):
    def structured_observation_descriptors(self):
        return {"storm": ObsLeafDescriptor.discrete(2)}

    def encode_observation(self, metrics, regime):
        return {"storm": int(regime["wind"] == 1)}
"""


def test_a_policy_whose_observations_the_scenario_encodes_is_for_its_library(act, tmp_path):
    (tmp_path / "own_windy.py").write_text(OWN)
    text = batch_scenario('type = "a2c", trials = 24, rollout = 8', run='env = "own_windy:Windy"')
    assert train(tmp_path, text) == 0
    policy = tmp_path / "out" / "r" / "policy"
    code, _, err = act(policy, "--regime", "wind=1")
    assert code == 1
    assert "encoded by Windy.encode_observation, in the scenario's own `env`" in err
    env = loopwright.make(tmp_path / "scenario.toml")
    observation, _ = env.reset()
    action, _ = A2C.load(policy / "policy.zip").predict(observation, deterministic=True)
    assert env.decode_action(action)["x"] in (0, 1, 2, 3)
    env.close()
