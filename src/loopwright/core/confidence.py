"""Confidence intervals of a mean over a few tasks."""

from collections.abc import Sequence
from math import nan, sqrt
from random import Random
from statistics import fmean

_DRAWS = 1000
_Z = 1.959964
"""The half-width of a 95 % interval of a normal distribution, in standard deviations."""


def interval(values: Sequence[float], seed: str) -> tuple[float, float, float]:
    """The mean and its 95 % interval: Wilson's if all values are 0 or 1, otherwise a bootstrap's."""
    if not {*values} <= {0.0, 1.0}:
        return bootstrap(values, seed)
    # Wilson's interval always has a width: with 0 of 26 solved, the rate may still be one in eight.
    count, share = len(values), fmean(values)
    middle = (share + _Z * _Z / (2 * count)) / (1 + _Z * _Z / count)
    half = _Z * sqrt(share * (1 - share) / count + (_Z / (2 * count)) ** 2) / (1 + _Z * _Z / count)
    return share, max(0.0, middle - half), min(1.0, middle + half)


def bootstrap(values: Sequence[float], seed: str) -> tuple[float, float, float]:
    """The mean and its 95 % bootstrap interval, which is NaN for a single value."""
    if len(values) == 1:
        return values[0], nan, nan
    random = Random(seed)
    means = sorted(fmean(random.choices(values, k=len(values))) for _ in range(_DRAWS))
    return fmean(values), means[int(0.025 * _DRAWS)], means[int(0.975 * _DRAWS) - 1]
