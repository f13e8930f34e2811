"""Intervals: how far a mean over a few tasks can be trusted."""

from collections.abc import Sequence
from math import nan, sqrt
from random import Random
from statistics import fmean

_DRAWS = 1000
_Z = 1.959964
"""95 % of a normal distribution lie so many standard deviations around its mean."""


def interval(values: Sequence[float], seed: str) -> tuple[float, float, float]:
    """The mean and the bounds of its 95 % interval: Wilson's, where all values are 0 or 1, otherwise a bootstrap's."""
    return _wilson(values) if {*values} <= {0.0, 1.0} else bootstrap(values, seed)


def bootstrap(values: Sequence[float], seed: str) -> tuple[float, float, float]:
    """The mean, and the bounds of 95 % of the means that as many values drawn anew would have; of one, nobody knows."""
    if len(values) == 1:
        return values[0], nan, nan
    random = Random(seed)
    means = sorted(fmean(random.choices(values, k=len(values))) for _ in range(_DRAWS))
    return fmean(values), means[int(0.025 * _DRAWS)], means[int(0.975 * _DRAWS) - 1]


def _wilson(values: Sequence[float]) -> tuple[float, float, float]:
    """Never without width: none of 26 solved may still be one in eight."""
    count, share = len(values), fmean(values)
    middle = (share + _Z * _Z / (2 * count)) / (1 + _Z * _Z / count)
    half = _Z * sqrt(share * (1 - share) / count + (_Z / (2 * count)) ** 2) / (1 + _Z * _Z / count)
    return share, max(0.0, middle - half), min(1.0, middle + half)
