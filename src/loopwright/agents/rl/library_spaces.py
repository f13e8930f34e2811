"""Spaces as a library's networks accept them: unchanged, in parts, or flattened. Requires gymnasium."""

from collections.abc import Iterable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TransformAction, TransformObservation

from loopwright.core.errors import LoopwrightError
from loopwright.envs.gym.codec import FlattenCodec
from loopwright.envs.gym.flat_actions import FlatActions

MIN_IMAGE_PIXELS = 36
"""Smaller images do not fit the convolutions of SB3's CnnPolicy."""
_RLLIB_IMAGE_PIXELS = (10, 42, 64, 84, 96)
"""The sizes of square images that RLlib has convolutions for."""
_NETWORK_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def wrap_for_library(env: "gym.Env[Any, Any]", library: str) -> "gym.Env[Any, Any]":
    """A live environment whose observations and actions the library's networks accept."""
    codec = flatten_codec(env.observation_space, library)
    actions = flat_actions(env.action_space, library)
    if codec is not None:
        env = TransformObservation(env, codec.encode, codec.gym_space)
    return env if actions is None else TransformAction(env, actions.decode, actions.gym_space)


def space_problem(space: "spaces.Space[Any]", where: str) -> str | None:
    """Why no network can observe or choose elements of this space, naming the part."""
    match space:
        case spaces.Dict():
            parts = [space_problem(part, f"{where}[{name!r}]") for name, part in space.spaces.items()]
        case spaces.Tuple():
            parts = [space_problem(part, f"{where}[{n}]") for n, part in enumerate(space.spaces)]
        case _ if isinstance(space, _NETWORK_SPACES):
            return None if space.shape is None or 0 not in space.shape else f"{where} has no elements: {space}"
        case _:
            return (
                f"{where} is a {type(space).__name__} space, which has no fixed number of values for a network. "
                'Encode it as a Box, or drop it, in a wrapper (wrappers = ["module:Class"])'
            )
    return next((reason for reason in parts if reason), None) if parts else f"{where} has no elements: {space}"


def is_image(space: "spaces.Space[Any]") -> bool:
    """Whether the observation is an image: bytes 0..255 with one, three or four channels, first or last."""
    if not isinstance(space, spaces.Box) or len(space.shape) != 3 or space.dtype != np.uint8:
        return False
    return bool((space.low == 0).all() and (space.high == 255).all())


def is_large_image(space: "spaces.Space[Any]") -> bool:
    """Whether an image is large enough for a convolutional network."""
    return is_image(space) and sorted(space.shape or ())[1] >= MIN_IMAGE_PIXELS


class ImageCodec:
    """Images as RLlib's convolutions take them: floats, bytes scaled to 0..1."""

    def __init__(self, space: spaces.Box) -> None:
        self._divisor = np.float32(255 if space.dtype == np.uint8 else 1)
        self.gym_space = spaces.Box(-np.inf, np.inf, space.shape, np.float32)

    def encode(self, observation: Any) -> Any:
        """The image in float32."""
        return np.asarray(observation, np.float32) / self._divisor


class PartsCodec:
    """Observations of a Dict or Tuple space as named parts, for a network with an encoder per part (RLlib)."""

    def __init__(self, space: "spaces.Space[Any]") -> None:
        self._space = space
        # Numbered, since PyTorch does not accept every name for a module.
        parts = {f"part_{n}": part for n, (part, _) in enumerate(_leaves(space, None))}
        self._codecs = {name: _rllib_codec(part) for name, part in parts.items()}
        self.gym_space = spaces.Dict(
            {name: part if (codec := self._codecs[name]) is None else codec.gym_space for name, part in parts.items()}
        )

    def encode(self, observation: Any) -> dict[str, Any]:
        """The parts of an observation."""
        values = (value for _, value in _leaves(self._space, observation))
        return {
            name: value if codec is None else codec.encode(value)
            for (name, codec), value in zip(self._codecs.items(), values, strict=True)
        }


def _leaves(space: "spaces.Space[Any]", value: Any) -> Iterator[tuple["spaces.Space[Any]", Any]]:
    """The parts of a space that have no parts themselves, each with its value."""
    match space:
        case spaces.Dict():
            parts: Iterable[tuple[Any, spaces.Space[Any]]] = space.spaces.items()
        case spaces.Tuple():
            parts = enumerate(space.spaces)
        case _:
            yield space, value
            return
    for key, part in parts:
        yield from _leaves(part, None if value is None else value[key])


def flatten_codec(space: "spaces.Space[Any]", library: str) -> FlattenCodec | ImageCodec | PartsCodec | None:
    """The codec that changes observations for a library, or None if the library accepts them as they are."""
    if reason := space_problem(space, "the observation space"):
        raise LoopwrightError(reason)
    if library == "rllib":
        return PartsCodec(space) if isinstance(space, spaces.Dict | spaces.Tuple) else _rllib_codec(space)
    if isinstance(space, spaces.Dict):  # named parts, but no nested ones; it sends every image through convolutions
        parts = space.spaces.values()
        accepted = all(_sb3_observes(part) and is_image(part) == is_large_image(part) for part in parts)
    else:
        accepted = _sb3_observes(space)
    return None if accepted else FlattenCodec(space)


def _rllib_codec(space: "spaces.Space[Any]") -> FlattenCodec | ImageCodec | None:
    """The codec of a space without parts. RLlib has encoders for vectors of floats and for images, channels last."""
    if isinstance(space, spaces.Box):
        if len(space.shape) == 1 and np.issubdtype(space.dtype, np.floating):
            return None
        if len(space.shape) == 3 and space.shape[0] == space.shape[1] and space.shape[0] in _RLLIB_IMAGE_PIXELS:
            return ImageCodec(space)
    return FlattenCodec(space)


def _sb3_observes(space: "spaces.Space[Any]") -> bool:
    """Whether SB3 accepts a part. It one-hot encodes indices, counting from 0."""
    match space:
        case spaces.Box():
            return space.shape != ()
        case spaces.Discrete():
            return int(space.start) == 0
        case spaces.MultiDiscrete():
            return space.nvec.ndim == 1 and not np.any(space.start)
    return isinstance(space, spaces.MultiBinary)


def flat_actions(space: "spaces.Space[Any]", library: str) -> FlatActions | None:
    """What turns a network's output into actions, or None if the library chooses in the space as it is."""
    if reason := space_problem(space, "the action space"):
        raise LoopwrightError(reason)
    if library == "rllib":
        parts = getattr(space, "spaces", [space])
        accepted = all(map(_rllib_chooses, parts.values() if isinstance(parts, dict) else parts))
    else:
        accepted = _sb3_chooses(space)
    return None if accepted else FlatActions(space)


def _sb3_chooses(space: "spaces.Space[Any]") -> bool:
    """Whether SB3 chooses well in a space. It counts from 0, and explores a Box around 0, clipped to finite bounds."""
    match space:
        case spaces.Box():
            symmetric = np.array_equal(space.low, -space.high) and space.is_bounded()
            return space.shape != () and np.issubdtype(space.dtype, np.floating) and symmetric
        case spaces.MultiBinary():
            return isinstance(space.n, int)
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and _sb3_observes(space)


def _rllib_chooses(space: "spaces.Space[Any]") -> bool:
    """Whether RLlib chooses in a space; it scales its output to a Box itself."""
    if isinstance(space, spaces.Box):
        return len(space.shape) == 1 and np.issubdtype(space.dtype, np.floating)
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and _sb3_observes(space)
