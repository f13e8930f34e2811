"""A model of recorded trials for points that nobody measured: the weighted mean of the nearest measured points.

A mean never exceeds what was measured, so that the model invents no optimum. How much each parameter counts in the
distance is fitted by leave-one-out error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwright.core.errors import InvalidAction
from loopwright.spaces.parameter import Choice, Fixed, Parameter

_NEIGHBOURS = 8
_SCALES = (0.2, 1.0, 3.0)
_FITTED_ON = 400
"""The error is estimated on at most this many points, evenly spread."""
_TINY = 1e-9

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimation:
    """What the model expects of a point: the mean of each value, and the share of failures among its neighbours."""

    values: tuple[float, ...]
    failing: float


class NeighbourModel:
    """Fitted to points, each with its values, or None if it failed."""

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        points: Sequence[Mapping[str, Any]],
        values: Sequence[Sequence[float] | None],
    ) -> None:
        self._parameters = {name: p for name, p in parameters.items() if not isinstance(p, Fixed)}
        width = max((len(row) for row in values if row is not None), default=0)
        self._failed = np.array([row is None for row in values])
        self._values: Array = np.array([row if row is not None else (0.0,) * width for row in values], dtype=float)
        self._raw: Array = np.array([self._encode(point) for point in points], dtype=float)
        self._owner = np.array([i for i, p in enumerate(self._parameters.values()) for _ in range(_width(p))])
        """Which parameter each column belongs to."""
        self._scales = np.ones(len(self._parameters))
        self.explained: float | None = None
        """The share of the first value's variance that the model predicts for a point it has not seen."""
        self._fit()
        self._points = self._raw * self._scales[self._owner]
        self._norms = (self._points**2).sum(axis=1)
        self._count = min(_NEIGHBOURS, len(self._points))

    def predict(self, point: Mapping[str, Any]) -> Estimation:
        """What to expect of a point."""
        place = np.array(self._encode(point)) * self._scales[self._owner]
        # |p - x|² without p - x, which would be copied for every prediction; without |x|², the order is the same.
        order = self._norms - self._points @ (2.0 * place)
        near = order.argpartition(self._count - 1)[: self._count]
        weights = 1.0 / (np.maximum(order[near] + place @ place, 0.0) + _TINY)
        ok = ~self._failed[near]
        total, succeeding = weights.sum(), weights[ok].sum()
        if not succeeding:
            return Estimation((), 1.0)
        mean = weights[ok] @ self._values[near[ok]] / succeeding
        return Estimation(tuple(mean.tolist()), float(1 - succeeding / total))

    def _encode(self, point: Mapping[str, Any]) -> list[float]:
        columns: list[float] = []
        for name, parameter in self._parameters.items():
            try:
                columns += _columns(parameter, point[name])
            except (KeyError, InvalidAction):  # absent, or `otherwise`
                columns += [0.0] * _width(parameter)
        return columns

    # -- fitting ------------------------------------------------------------------------------------------------

    def _fit(self) -> None:
        ok = np.flatnonzero(~self._failed)
        if len(ok) < 2 * _NEIGHBOURS:
            return
        sample = ok[np.linspace(0, len(ok) - 1, min(len(ok), _FITTED_ON)).round().astype(int)]
        spread = float(self._values[sample, 0].var())
        if not spread:
            return
        best = self._error(sample, self._scales)
        for index in range(len(self._scales)):
            for scale in _SCALES:
                scales = self._scales.copy()
                scales[index] = scale
                if (error := self._error(sample, scales)) < best:
                    best, self._scales = error, scales
        self.explained = max(0.0, 1 - best / spread)

    def _error(self, sample: NDArray[np.int64], scales: Array) -> float:
        """The mean squared error of the first value at these points, each predicted from all others."""
        points = self._raw * scales[self._owner]
        measured, values = points[~self._failed], self._values[~self._failed, 0]
        place = np.cumsum(~self._failed) - 1
        squares = ((points[sample, None, :] - measured[None, :, :]) ** 2).sum(axis=2)
        squares[np.arange(len(sample)), place[sample]] = np.inf
        near = np.argpartition(squares, _NEIGHBOURS - 1, axis=1)[:, :_NEIGHBOURS]
        weights = 1.0 / (np.take_along_axis(squares, near, axis=1) + _TINY)
        predicted = (weights * values[near]).sum(axis=1) / weights.sum(axis=1)
        return float(((predicted - self._values[sample, 0]) ** 2).mean())


def _width(parameter: Parameter) -> int:
    return 1 + (parameter.size if isinstance(parameter, Choice) and not parameter.ordered else 1)


def _columns(parameter: Parameter, value: Any) -> list[float]:
    """A value as coordinates: 1 for being active, then a position in 0..1, or a column per candidate."""
    if not isinstance(parameter, Choice):
        return [1.0, parameter.encode(value)]
    index = parameter.encode(value)
    if parameter.ordered:
        return [1.0, index / (parameter.size - 1)]
    # Two different candidates are 1 apart, like the two ends of a range.
    return [1.0, *(0.5**0.5 if place == index else 0.0 for place in range(parameter.size))]
