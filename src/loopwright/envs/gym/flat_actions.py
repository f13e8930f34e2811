"""Actions of any Gymnasium space, chosen by a network that has one flat output. Requires gymnasium: import it late."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class _Part:
    """A space without parts of its own, as numbers in a row."""

    low: Array
    high: Array
    cases: Array
    """How many cases each number tells apart, from 0 on; 0 for the numbers of a Box."""
    build: Callable[[Array], Any]
    """The element of the space that these numbers describe."""


class FlatActions:
    """Turns a network's output into an action of the environment.

    Discrete parts alone become a `Discrete` or a `MultiDiscrete`, counting from 0. With a Box among them, the network
    chooses in one Box from −1 to 1, where each case of a discrete part owns an equal share of the line. Numbers without
    both bounds stay as they are; where there is none, the Box has the largest number as its bound: networks explore
    around 0, and SB3 accepts finite bounds only.
    """

    def __init__(self, space: "spaces.Space[Any]") -> None:
        self._space = space
        self._parts = _parts(space)
        self._ends = np.cumsum([len(part.low) for part in self._parts])[:-1]
        self._low = np.concatenate([part.low for part in self._parts])
        self._high = np.concatenate([part.high for part in self._parts])
        self._cases = np.concatenate([part.cases for part in self._parts])
        self._is_discrete = bool((self._cases > 0).all())
        self._bounded = np.isfinite(self._low) & np.isfinite(self._high)
        self.is_bounded = bool(self._bounded.all())
        self.gym_space = self._gym_space()

    def _gym_space(self) -> "spaces.Space[Any]":
        if self._is_discrete:
            cases = self._cases
            return spaces.Discrete(int(cases[0])) if len(cases) == 1 else spaces.MultiDiscrete(cases)
        low, high = np.where(self._bounded, -1.0, self._low), np.where(self._bounded, 1.0, self._high)
        largest = np.finfo(np.float32).max
        low, high = np.clip(low, -largest, largest), np.clip(high, -largest, largest)
        return spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)

    def decode(self, action: Any) -> Any:
        """The environment's action."""
        numbers: Array = np.asarray(action).ravel()
        if not self._is_discrete:
            share = (np.clip(numbers.astype(np.float64), -1.0, 1.0) + 1.0) / 2.0
            with np.errstate(invalid="ignore"):  # infinite bounds, whose numbers stay as they are
                scaled = np.where(self._bounded, self._low + share * (self._high - self._low), numbers)
            cases = np.minimum((share * self._cases).astype(np.int64), self._cases - 1)
            numbers = np.where(self._cases > 0, cases, scaled)
        pieces = zip(self._parts, np.split(numbers, self._ends), strict=True)
        return _assemble(self._space, iter([part.build(values) for part, values in pieces]))


def _parts(space: "spaces.Space[Any]") -> list[_Part]:
    match space:
        case spaces.Dict():
            return [part for child in space.spaces.values() for part in _parts(child)]
        case spaces.Tuple():
            return [part for child in space.spaces for part in _parts(child)]
        case spaces.Discrete():
            start, make = int(space.start), np.dtype(space.dtype).type
            return [_discrete([int(space.n)], lambda values: make(start + int(values[0])))]
        case spaces.MultiDiscrete():
            offset = space.start
            return [_discrete(space.nvec.ravel(), lambda v: (v.reshape(offset.shape) + offset).astype(space.dtype))]
        case spaces.MultiBinary():
            return [_discrete([2] * int(np.prod(space.shape)), lambda v: v.reshape(space.shape).astype(np.int8))]
        case spaces.Box():
            low, high = space.low.astype(np.float64).ravel(), space.high.astype(np.float64).ravel()
            return [_Part(low, high, np.zeros(len(low), np.int64), _box_builder(space))]
    raise TypeError(f"actions of a {type(space).__name__} space cannot be chosen by a network")


def _discrete(cases: Sequence[int] | Array, build: Callable[[Array], Any]) -> _Part:
    counts = np.asarray(cases, np.int64)
    return _Part(np.zeros(len(counts)), counts - 1.0, counts, build)


def _box_builder(space: spaces.Box) -> Callable[[Array], Any]:
    rounds = np.issubdtype(space.dtype, np.integer)

    def build(values: Array) -> Any:
        numbers = np.rint(values) if rounds else values
        return np.asarray(np.clip(numbers.reshape(space.shape), space.low, space.high), space.dtype)

    return build


def _assemble(space: "spaces.Space[Any]", values: Any) -> Any:
    match space:
        case spaces.Dict():
            return {name: _assemble(child, values) for name, child in space.spaces.items()}
        case spaces.Tuple():
            return tuple(_assemble(child, values) for child in space.spaces)
    return next(values)
