"""Saved policies of live runs."""

import json

import pytest
from tests.agents.rl.scenarios import live_scenario, rows, train

from loopwright.agents.rl.policy import PolicyError, act

SERVERS = """
import numpy as np
from gymnasium import spaces
from tests.envs.helpers import LineServer, SampleServer

BOX, TWO = spaces.Box(-np.inf, 1, (2,), np.float32), spaces.Discrete(2)

class Guess(LineServer):
    '''The right action is the drawn side, which the observation does not contain.'''
    observation_space, action_space = spaces.Box(0, 1, (1,), np.float32), TWO

    def reset(self, *, seed=None, options=None):
        self.side = ["left", "right"].index(options["env_params"]["side"])
        return super().reset(seed=seed, options=options)

    def step(self, action):
        seen, _, over, _, _ = super().step(action)
        return seen, float(action == self.side), over, False, {}

    def _observation(self):
        return np.zeros(1, np.float32)

def shows(space):
    return lambda: SampleServer(space, TWO)

Index = shows(spaces.Discrete(3))
Later = shows(spaces.Discrete(3, start=5))
Indices = shows(spaces.MultiDiscrete([2, 3]))
Bits = shows(spaces.MultiBinary(2))
Parts = shows(spaces.Dict({"far": BOX, "near": TWO}))
Pair = shows(spaces.Tuple((BOX, TWO)))
Deep = shows(spaces.Dict({"a": spaces.Dict({"b": TWO})}))
Grid = shows(spaces.Box(0, 1, (2, 2), np.float64))
"""


SIDES = '[run.live.args]\nside = ["left", "right"]\n[run.env_params.side]'


def train_on(directory, agent, name, more=SIDES):
    module = f"served_{directory.name}"  # a new name, since a module is imported only once
    (directory / f"{module}.py").write_text(SERVERS)
    assert train(directory, live_scenario(agent, f"{module}:{name}", more)) == 0
    return directory / "out" / "r" / "policy"


def test_r05_a_live_policy_learns_from_the_regime(tmp_path):
    agent = 'type = "ppo", trials = 1500, rollout = 128, learning_rate = 0.01, seed = 1'
    policy = train_on(tmp_path, agent, "Guess")
    assert act(policy, {"side": "left"}, [0.0]) == 0
    assert act(policy, {"side": "right"}, [0.0]) == 1


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
@pytest.mark.parametrize(
    ("name", "observation", "bad_observation", "words"),
    [
        ("Index", 2, 3, "is not in Discrete(3)"),
        ("Later", 5, 0, "is not in Discrete(3, start=5)"),
        ("Indices", [1, 2], [1, 3], "is not in MultiDiscrete"),
        ("Bits", [0, 1], [0, 1, 1], "is not in MultiBinary(2)"),
        ("Parts", {"far": [0.5, 1], "near": 1}, {"far": [0.5, 1]}, "expected the keys ['far', 'near']"),
        ("Pair", [[0.5, 1], 0], [[0.5], 0], "observation[0]: expected shape (2,), got (1,)"),
        ("Deep", {"a": {"b": 0}}, {"a": 0}, "observation['a']: expected the keys ['b'], got 0"),
        ("Grid", [[0, 1], [0, 1]], "north", "expected numbers of float64, got 'north'"),
    ],
)
def test_a_live_policy_acts_on_observations_of_every_space(
    tmp_path, algorithm, name, observation, bad_observation, words
):
    policy = train_on(tmp_path, f'type = "{algorithm}", trials = 24, rollout = 8', name)
    assert len(rows(tmp_path)) == 24
    assert act(policy, {"side": "left"}, observation) in (0, 1)
    with pytest.raises(PolicyError) as raised:
        act(policy, {"side": "left"}, bad_observation)
    assert str(raised.value).startswith(f"{bad_observation!r} is not an observation of this policy: observation")
    assert words in str(raised.value)


def test_policy_json_is_valid_json_without_infinities(tmp_path):
    policy = train_on(tmp_path, 'type = "ppo", trials = 8, rollout = 8', "Parts", more="")

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    card = json.loads((policy / "policy.json").read_text(), parse_constant=refuse)
    parts = card["observation_space"]["spaces"]
    assert parts["far"] == {"type": "Box", "shape": [2], "dtype": "float32"}
    del card["observation_space"]
    (policy / "policy.json").write_text(json.dumps(card))
    with pytest.raises(PolicyError, match="lacks the policy's observation space"):
        act(policy, {}, {"far": [0, 0], "near": 0})
