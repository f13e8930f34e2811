"""The contract G14: every action and observation space reaches the network and the environment, or is refused."""

import json
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwright.agents.rl.library_spaces import flat_actions, wrap_for_library
from loopwright.agents.rl.policy import act
from loopwright.envs.gym.adapter import LiveAdapter
from loopwright.scenario.load import load
from tests.agents.rl.scenarios import live_scenario, load_error, saved_model, train, write_scenario
from tests.envs.helpers import SampleServer, live_env

BOX = spaces.Box(10.0, 20.0, (2,), np.float32)
ACTIONS = {
    "offset": spaces.Discrete(3, start=-1),
    "multi": spaces.MultiDiscrete([3, 2], start=[-1, 5]),
    "matrix": spaces.MultiDiscrete([[3, 2], [2, 2]]),
    "binary": spaces.MultiBinary((2, 2)),
    "asymmetric": BOX,
    "scalar": spaces.Box(-1.0, 1.0, (), np.float32),
    "integers": spaces.Box(0, 7, (2,), np.int16),
    "dict": spaces.Dict({"a": spaces.Discrete(2, start=4), "b": spaces.Dict({"c": spaces.MultiBinary(2)})}),
    "tuple": spaces.Tuple((spaces.Discrete(3), BOX)),
    "unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "open": spaces.Tuple((spaces.Box(0.0, np.inf, (1,), np.float32), BOX)),
}


@pytest.mark.parametrize("space", ACTIONS.values(), ids=ACTIONS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_g14_every_choice_of_a_network_is_an_action_of_the_environment(space, seed):
    actions = flat_actions(space, "sb3")
    actions.gym_space.seed(seed)
    assert space.contains(actions.decode(actions.gym_space.sample()))


def test_g14_every_discrete_action_can_be_chosen():
    for name, count in (("offset", 3), ("multi", 6), ("matrix", 24), ("binary", 16), ("dict", 8)):
        actions = flat_actions(ACTIONS[name], "sb3")
        ranges = [actions.gym_space.n] if name == "offset" else actions.gym_space.nvec
        chosen = {repr(actions.decode(np.array(choice))) for choice in np.ndindex(*ranges)}
        assert len(chosen) == count, name
    assert [int(flat_actions(ACTIONS["offset"], "sb3").decode(np.int64(n))) for n in range(3)] == [-1, 0, 1]
    mixed = flat_actions(ACTIONS["tuple"], "sb3")
    assert [int(mixed.decode(np.array([x, 0, 0]))[0]) for x in (-1.0, 0.0, 1.0)] == [0, 1, 2]
    assert mixed.decode(np.array([0, -1, 1], np.float32))[1].tolist() == [10.0, 20.0]


@pytest.mark.parametrize("space", [spaces.Discrete(4), spaces.Box(-2, 2, (1,), np.float32), spaces.MultiBinary(3)])
def test_g14_a_space_that_sb3_chooses_in_is_not_changed(space):
    assert flat_actions(space, "sb3") is None


def test_g14_rllib_gets_dict_and_tuple_actions_as_they_are():
    assert flat_actions(spaces.Dict({"a": spaces.Discrete(2), "b": BOX}), "rllib") is None
    assert flat_actions(ACTIONS["offset"], "rllib") is not None


SERVER = """
import gymnasium
import numpy as np
from gymnasium import spaces

class Any(gymnasium.Env):
    observation_space = {observation}
    action_space = {action}
    def reset(self, *, seed=None, options=None):
        self.left = 5
        return self.observation_space.sample(), {{"action_mask": np.array([1, 0], np.int8)}}
    def step(self, action):
        assert self.action_space.contains(action), action
        self.left -= 1
        return self.observation_space.sample(), 1.0, self.left == 0, False, {{"action_mask": np.array([1, 0], np.int8)}}

class Registered(Any): ...
gymnasium.register("{name}/Any-v0", entry_point=Registered)
"""


def write_server(directory, name, observation="spaces.Box(-1, 1, (2,), np.float32)", action="spaces.Discrete(2)"):
    (directory / f"{name}.py").write_text(SERVER.format(name=name, observation=observation, action=action))
    return f"{name}:Any"


@pytest.mark.parametrize(
    ("agent", "observation", "action", "example"),
    [
        (
            "ppo",
            "spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2)))",
            "spaces.Discrete(3, start=-1)",
            [1, [0, 1]],
        ),
        (
            "sac",
            "spaces.Dict({'image': spaces.Box(0, 255, (8, 8, 3), np.uint8), 'x': spaces.Box(0, 1, (), np.float32)})",
            "spaces.Dict({'go': spaces.Discrete(2, start=1), 'how': spaces.Box(10, 20, (), np.float32)})",
            {"image": np.zeros((8, 8, 3), int).tolist(), "x": 0.5},
        ),
        (
            "a2c",
            "spaces.Discrete(3)",
            "spaces.Tuple((spaces.Box(0, np.inf, (1,)), spaces.Box(-np.inf, np.inf, (2,))))",
            1,
        ),
    ],
)
def test_g14_a_policy_trains_and_acts_in_spaces_of_every_kind(tmp_path, agent, observation, action, example):
    path = write_server(tmp_path, f"g14_{agent}", observation, action)
    assert train(tmp_path, live_scenario(f'type = "{agent}", trials = 80', path)) == 0
    chosen = act(tmp_path / "out" / "r" / "policy", {}, example)
    if agent == "ppo":
        assert chosen in (-1, 0, 1)
    elif agent == "sac":
        assert chosen["go"] in (1, 2)
        assert 10 <= chosen["how"] <= 20
    else:
        assert chosen[0][0] >= 0
        assert len(chosen[1]) == 2
    assert json.loads(json.dumps(chosen)) == chosen


def test_g14_an_image_is_seen_by_convolutions_unless_a_policy_is_named(tmp_path):
    path = write_server(tmp_path, "g14_image", "spaces.Box(0, 255, (40, 40, 3), np.uint8)")
    assert train(tmp_path, live_scenario('type = "ppo", trials = 20, rollout = 16', path)) == 0
    assert type(saved_model(tmp_path).policy).__name__ == "ActorCriticCnnPolicy"
    (tmp_path / "named").mkdir()
    path = write_server(tmp_path / "named", "g14_named_image", "spaces.Box(0, 255, (40, 40, 3), np.uint8)")
    named = live_scenario('type = "ppo", trials = 20, rollout = 16, policy = "MlpPolicy"', path)
    assert train(tmp_path / "named", named) == 0
    assert type(saved_model(tmp_path / "named").policy).__name__ == "ActorCriticPolicy"
    wrong = load_error(tmp_path / "named", named.replace("MlpPolicy", "CnPolicy"))
    assert "[run.agent] policy: unknown policy 'CnPolicy'. " in wrong


@pytest.mark.parametrize(
    ("observation", "action", "words"),
    [
        ("spaces.Sequence(spaces.Discrete(2))", "spaces.Discrete(2)", "the observation space is a Sequence space"),
        (
            "spaces.Dict({'mission': spaces.Text(9)})",
            "spaces.Discrete(2)",
            "the observation space['mission'] is a Text",
        ),
        ("spaces.Graph(spaces.Discrete(2), None)", "spaces.Discrete(2)", "the observation space is a Graph space"),
        ("spaces.Discrete(2)", "spaces.Tuple((spaces.Text(9),))", "the action space[0] is a Text space"),
    ],
)
def test_g14_spaces_without_a_fixed_size_are_refused_at_load_time(tmp_path, observation, action, words):
    path = write_server(tmp_path, f"g14_refused_{abs(hash((observation, action)))}", observation, action)
    message = load_error(tmp_path, live_scenario('type = "ppo", trials = 80', path))
    assert words in message
    assert "which has no fixed number of values for a network. Encode it" in message


@pytest.mark.parametrize(
    ("agent", "observation", "action", "words"),
    [
        ("ppo", "spaces.Dict({})", "spaces.Discrete(2)", "the observation space has no elements"),
        ("sac", "spaces.Discrete(2)", "spaces.Box(0, np.inf, (1,))", "'sac' needs bounds"),
    ],
)
def test_g14_spaces_that_an_algorithm_cannot_use_are_refused(tmp_path, agent, observation, action, words):
    path = write_server(tmp_path, f"g14_unusable_{agent}", observation, action)
    assert words in load_error(tmp_path, live_scenario(f'type = "{agent}", trials = 80', path))


def test_g14_a_module_that_registers_the_environment_can_be_named(tmp_path):
    write_server(tmp_path, "g14_registers")
    load(
        write_scenario(
            tmp_path, live_scenario('type = "ppo", trials = 80', "gymnasium:g14_registers:g14_registers/Any-v0")
        )
    )
    assert "g14_registers" in sys.modules
    message = load_error(tmp_path, live_scenario('type = "ppo", trials = 80', "gymnasium:g14_nowhere:Any-v0"))
    assert "gymnasium has no environment 'g14_nowhere:Any-v0': No module named 'g14_nowhere'" in message


@pytest.mark.parametrize(
    "agent",
    [
        'type = "td3", trials = 60',
        'type = "sb3", algorithm = "sb3_contrib:RecurrentPPO", trials = 20, rollout = 16',
        'type = "maskable_ppo", trials = 40, rollout = 16',
    ],
)
def test_g14_other_algorithms_train_by_name_or_path(tmp_path, agent):
    action = "spaces.Box(0, 1, (1,), np.float32)" if "td3" in agent else "spaces.Discrete(2)"
    assert train(tmp_path, live_scenario(agent, write_server(tmp_path, f"g14_{agent[8:11]}", action=action))) == 0
    chosen = act(tmp_path / "out" / "r" / "policy", {}, [0.0, 0.0])
    assert chosen in (0, 1) or 0 <= chosen[0] <= 1


def test_g14_the_wrapped_environment_is_a_gymnasium_env(tmp_path):
    env = LiveAdapter(live_env(tmp_path, SampleServer(spaces.Tuple((BOX, spaces.Discrete(2))), ACTIONS["tuple"])))
    wrapped = wrap_for_library(env, "sb3")
    assert isinstance(wrapped, gymnasium.Env)
    wrapped.reset(seed=1)
    assert wrapped.step(wrapped.action_space.sample())[0] in wrapped.observation_space
    env.close()
