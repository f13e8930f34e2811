"""Confidence intervals of a mean over a few tasks or measurements."""

from collections.abc import Sequence
from functools import cache
from math import copysign, exp, nan, pi, sqrt, tan
from random import Random
from statistics import NormalDist, fmean

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


@cache
def t_quantile(p: float, freedom: float) -> float:
    """The quantile of Student's t distribution, to about three digits, by Hill's expansion (1970)."""
    tail = 2 * min(p, 1 - p)
    if freedom <= 1:
        size = tan(pi / 2 * (1 - tail))
    elif freedom < 2:
        # Between the closed forms of 1 and 2 degrees of freedom, on the conservative side.
        size = abs(t_quantile(p, 1))
    elif freedom == 2:
        size = sqrt(2 / (tail * (2 - tail)) - 2)
    else:
        size = _hill(tail, freedom)
    return copysign(size, p - 0.5)


def _hill(tail: float, freedom: float) -> float:
    a = 1 / (freedom - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * sqrt(a * pi / 2) * freedom
    y = (d * tail) ** (2 / freedom)
    if y > a + 0.05:
        x = NormalDist().inv_cdf(tail / 2)
        y = x * x
        if freedom < 5:
            c += 0.3 * (freedom - 4.5) * (x + 0.6)
        c = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = exp(a * y * y) - 1
    else:
        inner = 1 / (((freedom + 6) / (freedom * y) - 0.089 * d - 0.822) * (freedom + 2) * 3) + 0.5 / (freedom + 4)
        y = (inner * y - 1) * ((freedom + 1) / (freedom + 2)) + 1 / y
    return sqrt(freedom * y)
