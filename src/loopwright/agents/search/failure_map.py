"""Where a space fails: whether the points nearest to a new one failed, by the parameters that matter for it."""

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from math import inf

from loopwright.core.trial import Action
from loopwright.spaces.parameter import Choice, Parameter

_FEWEST = 3
_NEAREST = 3
_REMEMBERED = 2000
"""Older points are forgotten, so that the cost of a proposal does not grow for ever."""
_FLOOR = 0.02
"""How much a parameter counts that seems to have nothing to do with failures."""


class FailureMap:
    """The latest points of a space with how they ended. Ranges and ordered lists have distances."""

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters = parameters
        self._scales = {
            name: (1 / max(1, parameter.size - 1) if parameter.ordered else inf)
            if isinstance(parameter, Choice)
            else 1.0
            for name, parameter in parameters.items()
        }
        self._points: list[tuple[dict[str, float], bool]] = []
        self._failures = 0
        self._weights: dict[str, float] = {}

    def add(self, action: Action, *, failed: bool) -> None:
        """Add a point that has ended."""
        self._points.append((self._place(action), failed))
        self._failures += failed
        if len(self._points) > _REMEMBERED:
            self._failures -= self._points.pop(0)[1]
        self._weights.clear()

    def is_likely_to_fail(self, action: Action) -> bool:
        """Whether the nearest point or most of the nearest three failed."""
        if self._failures < _FEWEST:
            return False
        if not self._weights:
            self._weights = {name: _FLOOR + self._relevance(name) ** 2 for name in self._parameters}
        place = self._place(action)
        nearest = sorted((self._distance(place, other), index) for index, (other, _) in enumerate(self._points))
        failed = [self._points[index][1] for _, index in nearest[:_NEAREST]]
        return failed[0] or 2 * sum(failed) > len(failed)

    def _relevance(self, name: str) -> float:
        """How much more often points with neighbouring values of a parameter end alike than any two points: 0 to 1."""
        points = sorted((place[name], failed) for place, failed in self._points if name in place)
        if len(points) < 2:
            return 0.0
        share = sum(failed for _, failed in points) / len(points)
        by_chance = share**2 + (1 - share) ** 2
        if isinstance(self._parameters[name], Choice):
            values: dict[float, list[bool]] = defaultdict(list)
            for value, failed in points:
                values[value].append(failed)
            rates = [(len(group), sum(group) / len(group)) for group in values.values()]
            alike = sum(count * (rate**2 + (1 - rate) ** 2) for count, rate in rates) / len(points)
        else:
            alike = sum(one == other for (_, one), (_, other) in pairwise(points)) / (len(points) - 1)
        return max(0.0, alike - by_chance) / (1 - by_chance) if by_chance < 1 else 0.0

    def _place(self, action: Action) -> dict[str, float]:
        return {name: self._parameters[name].encode(value) for name, value in action.items()}

    def _distance(self, one: Mapping[str, float], other: Mapping[str, float]) -> float:
        """The squared distance; a value that only one of them has is as far as any."""
        total = float(sum(self._weights[name] for name in one.keys() ^ other.keys()))
        for name, value in one.items():
            if name in other and value != other[name]:
                total += self._weights[name] * min(1.0, abs(value - other[name]) * self._scales[name]) ** 2
        return total
