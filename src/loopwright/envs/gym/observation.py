"""Structured observations: named leaves with descriptors, and an encoding for each drawn parameter."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

from loopwright.spaces.parameter import Choice
from loopwright.spaces.space import Draws


@dataclass(frozen=True)
class ObsLeafDescriptor:
    """One leaf of a structured observation: `box(dim)` holds numbers, `discrete(n)` one of n cases."""

    kind: str
    size: int

    def __post_init__(self) -> None:
        if self.kind not in ("box", "discrete"):
            raise ValueError(f"a leaf is 'box' or 'discrete', not {self.kind!r}")
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"the size of a {self.kind} leaf must be an integer of at least 1, not {self.size!r}")

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
    """Have these methods on an environment for structured observations; inherit nothing.

    class Windy(SearchEnv):
        def structured_observation_descriptors(self):
            return {"last": ObsLeafDescriptor.box(1), "storm": ObsLeafDescriptor.discrete(2)}

        def encode_observation(self, metrics, regime):
            return {"last": [metrics.get("y") or 0.0], "storm": int(regime["wind"] == "storm")}
    """

    def structured_observation_descriptors(self) -> Mapping[str, ObsLeafDescriptor] | None:
        """The leaves, by name. With none, observations are not structured."""
        ...

    def encode_observation(self, metrics: Mapping[str, Any], regime: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values of the leaves: a list of numbers for a box, an index for a discrete leaf. Keys as declared.

        `metrics` are those of the last trial, None where there is none yet, and empty in a live run.
        """
        ...


class RegimeEncoder:
    """Encodes the regime: `categorical` as the candidate's index, `scalar` as its value, `log` as its logarithm."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws

    def structured_observation_descriptors(self) -> dict[str, ObsLeafDescriptor]:
        """One leaf per drawn parameter."""
        return {
            name: ObsLeafDescriptor.discrete(choice.size)
            if self._draws.configs[name].encoding == "categorical"
            else ObsLeafDescriptor.box(1)
            for name, choice in self._draws.values.items()
        }

    def encode_observation(self, metrics: Mapping[str, Any], regime: Mapping[str, Any]) -> dict[str, Any]:
        """The encoded value of each drawn parameter."""
        return {name: self._value(name, choice, regime[name]) for name, choice in self._draws.values.items()}

    def _value(self, name: str, choice: Choice, value: Any) -> Any:
        match self._draws.configs[name].encoding:
            case "categorical":
                return choice.encode(value)
            case "log":
                return [math.log(value)]
        return [float(value)]
