"""Observations for learners: named leaves with strict descriptors, and one encoding per drawn parameter."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

from loopwright.spaces.draws import Draws
from loopwright.spaces.parameter import Choice


@dataclass(frozen=True)
class ObsLeafDescriptor:
    """One leaf of a structured observation: `box(dim)` holds numbers, `discrete(n)` one of n cases."""

    kind: str
    size: int

    def __post_init__(self) -> None:
        if self.kind not in ("box", "discrete"):
            raise ValueError(f"a leaf is 'box' or 'discrete', not {self.kind!r}")
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"a {self.kind} leaf needs a whole size of at least 1, not {self.size!r}")

    @classmethod
    def box(cls, dim: int) -> Self:
        """`dim` numbers."""
        return cls("box", dim)

    @classmethod
    def discrete(cls, n: int) -> Self:
        """One of the cases 0..n-1."""
        return cls("discrete", n)


@runtime_checkable
class StructuredObservation(Protocol):
    """What an environment implements to give structured observations; the encoded keys equal the descriptors' keys."""

    def structured_observation_descriptors(self) -> Mapping[str, ObsLeafDescriptor]:
        """The leaves, by name."""
        ...

    def encode_observation(self, regime: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values of the leaves: a list of numbers for a box, an index for a discrete leaf."""
        ...


class RegimeEncoder:
    """The regime as leaves: `categorical` is the candidate's index, `scalar` its value, `log` the value's logarithm."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws

    def structured_observation_descriptors(self) -> dict[str, ObsLeafDescriptor]:
        """One leaf per drawn parameter."""
        return {name: self._leaf(name, choice) for name, choice in self._draws.values.items()}

    def _leaf(self, name: str, choice: Choice) -> ObsLeafDescriptor:
        categorical = self._draws.configs[name].encoding == "categorical"
        return ObsLeafDescriptor.discrete(choice.size) if categorical else ObsLeafDescriptor.box(1)

    def encode_observation(self, regime: Mapping[str, Any]) -> dict[str, Any]:
        """The drawn values as a learner sees them."""
        return {name: self._value(name, choice, regime[name]) for name, choice in self._draws.values.items()}

    def _value(self, name: str, choice: Choice, value: Any) -> Any:
        match self._draws.configs[name].encoding:
            case "categorical":
                return choice.index(value)
            case "log":
                return [math.log(value)]
        return [float(value)]
