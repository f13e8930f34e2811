"""What a library's networks can look at: an observation as it is, or as one row of numbers. Import it late."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation

from loopwright.core.errors import LoopwrightError
from loopwright.envs.gym.codec import RowCodec

_IMAGE = 3
"""The dimensions of an image: height, width, channels."""


def in_sight(env: "gym.Env[Any, Any]", library: str) -> "gym.Env[Any, Any]":
    """A live environment with observations that the library's networks take."""
    row = row_for(env.observation_space, library)
    return env if row is None else TransformObservation(env, row.encode, row.gym_space)


def row_for(space: "spaces.Space[Any]", library: str) -> RowCodec | None:
    """What makes a row of an observation; None where the library takes it as it is."""
    if _seen_by_rllib(space) if library == "rllib" else _seen_by_sb3(space):
        return None
    try:
        return RowCodec(space)
    except (ValueError, NotImplementedError) as error:
        raise LoopwrightError(f"no network can look at {space}: {error}") from error


def _seen_by_sb3(space: "spaces.Space[Any]") -> bool:
    """Named parts are, nested ones are not; an index becomes one of n cases, counted from 0."""
    if isinstance(space, spaces.Dict):
        return all(_plain(part) for part in space.spaces.values())
    return _plain(space)


def _plain(space: "spaces.Space[Any]") -> bool:
    match space:
        case spaces.Box():
            return space.shape != ()
        case spaces.Discrete():
            return int(space.start) == 0
        case spaces.MultiDiscrete():
            return space.nvec.ndim == 1 and not np.any(space.start)
    return isinstance(space, spaces.MultiBinary)


def _seen_by_rllib(space: "spaces.Space[Any]") -> bool:
    if not isinstance(space, spaces.Box):
        return False
    return len(space.shape) == _IMAGE or (len(space.shape) == 1 and np.issubdtype(space.dtype, np.floating))
