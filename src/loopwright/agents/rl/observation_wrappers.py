"""Observations as a library's networks accept them: unchanged, or flattened to a vector. Requires gymnasium."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation

from loopwright.core.errors import LoopwrightError
from loopwright.envs.gym.codec import FlattenCodec


def wrap_for_library(env: "gym.Env[Any, Any]", library: str) -> "gym.Env[Any, Any]":
    """A live environment whose observations the library's networks accept."""
    codec = flatten_codec(env.observation_space, library)
    return env if codec is None else TransformObservation(env, codec.encode, codec.gym_space)


def flatten_codec(space: "spaces.Space[Any]", library: str) -> FlattenCodec | None:
    """The codec that flattens observations for a library, or None if the library accepts them as they are."""
    if library == "rllib":  # an image (height, width, channels) or a vector of floats
        accepted = isinstance(space, spaces.Box) and (
            len(space.shape) == 3 or (len(space.shape) == 1 and np.issubdtype(space.dtype, np.floating))
        )
    else:  # named parts, but no nested ones
        accepted = all(map(_sb3_accepts, space.spaces.values() if isinstance(space, spaces.Dict) else [space]))
    if accepted:
        return None
    try:
        return FlattenCodec(space)
    except (ValueError, NotImplementedError) as error:
        raise LoopwrightError(f"observation space {space} cannot be flattened for a network: {error}") from error


def _sb3_accepts(space: "spaces.Space[Any]") -> bool:
    """Whether SB3 accepts a part. It one-hot encodes indices, counting from 0."""
    match space:
        case spaces.Box():
            return space.shape != ()
        case spaces.Discrete():
            return int(space.start) == 0
        case spaces.MultiDiscrete():
            return space.nvec.ndim == 1 and not np.any(space.start)
    return isinstance(space, spaces.MultiBinary)
