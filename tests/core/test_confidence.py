"""Intervals of means: they contain the mean, narrow with more values, and are reproducible."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.core.confidence import bootstrap, interval


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12))
def test_the_bounds_lie_within_the_values(values):
    mean, low, high = bootstrap(values, "seed")
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    assert mean == pytest.approx(sum(values) / len(values), abs=1e-6)


@pytest.mark.parametrize(
    ("solved", "of", "low", "high"),
    # Wilson's formula by hand: of 0 in n, the upper bound is z² / (n + z²).
    [(0, 26, 0.0, 0.1287), (26, 26, 0.8713, 1.0), (1, 1, 0.2065, 1.0), (50, 100, 0.4038, 0.5962)],
)
def test_zero_or_all_of_a_few_is_not_certain(solved, of, low, high):
    values = [1.0] * solved + [0.0] * (of - solved)
    assert interval(values, "a") == pytest.approx((solved / of, low, high), abs=1e-4)


def test_one_value_gives_no_interval():
    mean, low, high = interval([0.5], "a")
    assert mean == 0.5
    assert math.isnan(low)
    assert math.isnan(high)


def test_a_seed_gives_the_same_interval_again():
    values = [0.0, 1.0, 0.5, 1.0, 1.0]
    assert interval(values, "a") == interval(values, "a")


def test_more_values_give_a_narrower_interval():
    (_, low, high), (_, lower, higher) = interval([0.0, 1.0] * 50, "a"), interval([0.0, 1.0] * 5, "a")
    assert high - low < higher - lower
    # Of a hundred throws of a coin, 95 % of the means lie about 0.1 to either side.
    assert (low, high) == (pytest.approx(0.4, abs=0.03), pytest.approx(0.6, abs=0.03))


def test_equal_values_give_a_point():
    assert interval([0.5] * 8, "a") == (0.5, 0.5, 0.5)
