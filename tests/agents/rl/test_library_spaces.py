"""Observations that a library accepts, and those that are flattened for it."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from tests.envs.helpers import SampleServer, live_env

from loopwright.agents.rl.library_spaces import flatten_codec, wrap_for_library
from loopwright.core.errors import LoopwrightError
from loopwright.envs.gym.adapter import LiveAdapter

BOX = spaces.Box(-1, 1, (2,), np.float32)
TWO = spaces.Discrete(2)
IMAGE = spaces.Box(0, 255, (84, 84, 3), np.uint8)


@pytest.mark.parametrize(
    ("space", "sb3", "rllib"),
    [
        (BOX, None, None),
        (TWO, None, 2),
        (spaces.Discrete(2, start=1), 2, 2),
        (spaces.MultiDiscrete([2, 3]), None, 5),
        (spaces.MultiDiscrete([[2, 3], [2, 2]]), 9, 9),
        (spaces.MultiBinary(3), None, 3),
        (spaces.Dict({"a": BOX, "b": TWO}), None, {"part_0": (2,), "part_1": (2,)}),
        (spaces.Dict({"a": spaces.Dict({"b": TWO})}), 2, {"part_0": (2,)}),
        (spaces.Tuple((BOX, spaces.Dict({"b": spaces.Discrete(3)}))), 5, {"part_0": (2,), "part_1": (3,)}),
        (spaces.Tuple((IMAGE, spaces.Box(0, 1, (3, 3)))), 84 * 84 * 3 + 9, {"part_0": (84, 84, 3), "part_1": (9,)}),
        (spaces.Box(0, 1, (), np.float32), 1, 1),
        (spaces.Box(0, 9, (2,), np.int64), None, 2),
        (IMAGE, None, (84, 84, 3)),
        (spaces.Box(0, 255, (50, 50, 3), np.uint8), None, 7500),
    ],
)
def test_unsupported_observations_are_flattened_or_given_in_parts(space, sb3, rllib):
    for library, shape in (("sb3", sb3), ("rllib", rllib)):
        codec = flatten_codec(space, library)
        if isinstance(shape, dict):
            assert {name: part.shape for name, part in codec.gym_space.items()} == shape
        else:
            assert (codec and codec.gym_space.shape) == ((shape,) if isinstance(shape, int) else shape)
        if codec is not None:
            assert codec.encode(space.sample()) in codec.gym_space


def test_the_bytes_of_an_image_are_scaled_for_rllib():
    image = np.full((84, 84, 3), 51, np.uint8)
    assert flatten_codec(IMAGE, "rllib").encode(image).max() == pytest.approx(0.2)
    floats = spaces.Box(0, 1, (84, 84, 3), np.float32)
    assert flatten_codec(floats, "rllib").encode(floats.high).max() == 1.0


def test_an_observation_that_cannot_be_flattened_is_an_error():
    with pytest.raises(LoopwrightError, match="is a Sequence space, which has no fixed number of values"):
        flatten_codec(spaces.Sequence(TWO), "sb3")


def test_the_flattened_observation_includes_the_regime(tmp_path):
    space = spaces.Tuple((BOX, TWO))
    env = LiveAdapter(live_env(tmp_path, SampleServer(space), drawn={"speed": [1, 2, 3]}))
    flat = wrap_for_library(env, "sb3")
    observation, info = flat.reset()
    assert observation.shape == (3 + 2 + 2,)  # in gymnasium's order: "context" before "observation"
    assert observation[:3].argmax() == info["env_params"]["speed"] - 1
    assert flat.step(1)[0] in flat.observation_space
    assert isinstance(flat, gymnasium.Env)
    env.close()
