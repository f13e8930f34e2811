"""Intervals: how far a mean over a few tasks can be trusted."""

from collections.abc import Sequence
from random import Random
from statistics import fmean

_DRAWS = 1000


def interval(values: Sequence[float], seed: str) -> tuple[float, float, float]:
    """The mean, and the bounds of 95 % of the means that as many values drawn anew would have (bootstrap)."""
    random = Random(seed)
    means = sorted(fmean(random.choices(values, k=len(values))) for _ in range(_DRAWS))
    return fmean(values), means[int(0.025 * _DRAWS)], means[int(0.975 * _DRAWS) - 1]
