"""What a library's networks can look at, and live policies that learn from more than a row of numbers."""

import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from tests.agents.trainings import live, rows, trained
from tests.envs.worlds import Shown
from tests.envs.worlds import live as live_world

from loopwright.agents.rl.observation_wrappers import flatten_codec, wrap_for_library
from loopwright.agents.rl.policy import PolicyError, act
from loopwright.core.errors import LoopwrightError
from loopwright.envs.gym.adapter import LiveAdapter

BOX = spaces.Box(-1, 1, (2,), np.float32)
TWO = spaces.Discrete(2)

SERVERS = """
import numpy as np
from gymnasium import spaces
from tests.envs.worlds import Line, Shown

BOX, TWO = spaces.Box(-np.inf, 1, (2,), np.float32), spaces.Discrete(2)

class Guess(Line):
    '''Right is what the drawn side says, of which the observation shows nothing.'''
    observation_space, action_space = spaces.Box(0, 1, (1,), np.float32), TWO

    def reset(self, *, seed=None, options=None):
        self.side = ["left", "right"].index(options["env_params"]["side"])
        return super().reset(seed=seed, options=options)

    def step(self, action):
        seen, _, over, _, _ = super().step(action)
        return seen, float(action == self.side), over, False, {}

    def _seen(self):
        return np.zeros(1, np.float32)

def shows(space):
    return lambda: Shown(space, TWO)

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


def served(home, agent, name, more=SIDES):
    module = f"served_{home.name}"  # one of its own, for a module is imported once
    (home / f"{module}.py").write_text(SERVERS)
    assert trained(home, live(agent, f"{module}:{name}", more)) == 0
    return home / "out" / "r" / "policy"


@pytest.mark.parametrize(
    ("space", "sb3", "rllib"),
    [
        (BOX, None, None),
        (TWO, None, 2),
        (spaces.Discrete(2, start=1), 2, 2),
        (spaces.MultiDiscrete([2, 3]), None, 5),
        (spaces.MultiDiscrete([[2, 3], [2, 2]]), 9, 9),
        (spaces.MultiBinary(3), None, 3),
        (spaces.Dict({"a": BOX, "b": TWO}), None, 4),
        (spaces.Dict({"a": spaces.Dict({"b": TWO})}), 2, 2),
        (spaces.Tuple((BOX, TWO)), 4, 4),
        (spaces.Box(0, 1, (), np.float32), 1, 1),
        (spaces.Box(0, 9, (2,), np.int64), None, 2),
        (spaces.Box(0, 255, (84, 84, 3), np.uint8), None, None),
    ],
)
def test_what_a_network_does_not_take_becomes_a_row(space, sb3, rllib):
    for library, length in (("sb3", sb3), ("rllib", rllib)):
        row = flatten_codec(space, library)
        assert (row and row.gym_space.shape) == (length and (length,))
        if row is not None:
            assert row.encode(space.sample()) in row.gym_space


def test_what_no_network_can_look_at_is_said():
    with pytest.raises(LoopwrightError, match="cannot be flattened for a network"):
        flatten_codec(spaces.Sequence(TWO), "sb3")


def test_a_row_holds_the_regime_too(tmp_path):
    shown = spaces.Tuple((BOX, TWO))
    env = LiveAdapter(live_world(tmp_path, Shown(shown), drawn={"speed": [1, 2, 3]}))
    row = wrap_for_library(env, "sb3")
    seen, info = row.reset()
    assert seen.shape == (3 + 2 + 2,)  # in gymnasium's order: "context" before "observation"
    assert seen[:3].argmax() == info["env_params"]["speed"] - 1
    assert row.step(1)[0] in row.observation_space
    assert isinstance(row, gymnasium.Env)
    env.close()


def test_r05_a_live_policy_learns_what_only_the_regime_tells(tmp_path):
    agent = 'type = "ppo", trials = 1500, rollout = 128, learning_rate = 0.01, seed = 1'
    policy = served(tmp_path, agent, "Guess")
    assert act(policy, {"side": "left"}, [0.0]) == 0
    assert act(policy, {"side": "right"}, [0.0]) == 1


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
@pytest.mark.parametrize(
    ("name", "observation", "wrong", "words"),
    [
        ("Index", 2, 3, "does not lie in Discrete(3)"),
        ("Later", 5, 0, "does not lie in Discrete(3, start=5)"),
        ("Indices", [1, 2], [1, 3], "does not lie in MultiDiscrete"),
        ("Bits", [0, 1], [0, 1, 1], "does not lie in MultiBinary(2)"),
        ("Parts", {"far": [0.5, 1], "near": 1}, {"far": [0.5, 1]}, "where the keys ['far', 'near'] are declared"),
        ("Pair", [[0.5, 1], 0], [[0.5], 0], "observation[0]: shape (1,) where (2,) is declared"),
        ("Deep", {"a": {"b": 0}}, {"a": 0}, "observation['a']: 0 where the keys ['b'] are declared"),
        ("Grid", [[0, 1], [0, 1]], "north", "'north' where numbers of float64 are declared"),
    ],
)
def test_a_live_policy_acts_on_whatever_its_server_shows(tmp_path, algorithm, name, observation, wrong, words):
    policy = served(tmp_path, f'type = "{algorithm}", trials = 24, rollout = 8', name)
    assert len(rows(tmp_path)) == 24
    assert act(policy, {"side": "left"}, observation) in (0, 1)
    with pytest.raises(PolicyError) as raised:
        act(policy, {"side": "left"}, wrong)
    assert str(raised.value).startswith(f"{wrong!r} is not an observation of this policy: observation")
    assert words in str(raised.value)


def test_the_card_of_a_live_policy_is_plain_json(tmp_path):
    policy = served(tmp_path, 'type = "ppo", trials = 8, rollout = 8', "Parts", more="")

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    card = json.loads((policy / "policy.json").read_text(), parse_constant=refuse)
    parts = card["observation_space"]["spaces"]
    assert parts["far"] == {"type": "Box", "shape": [2], "dtype": "float32"}
    del card["observation_space"]
    (policy / "policy.json").write_text(json.dumps(card))
    with pytest.raises(PolicyError, match="lacks the policy's observation space"):
        act(policy, {}, {"far": [0, 0], "near": 0})
