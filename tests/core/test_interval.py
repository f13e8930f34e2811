"""Intervals of means: they hold the mean, narrow with more values, and come out the same each time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.core.interval import interval


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12))
def test_the_bounds_lie_within_the_values(values):
    mean, low, high = interval(values, "seed")
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    assert mean == pytest.approx(sum(values) / len(values), abs=1e-6)


def test_a_seed_gives_the_same_interval_again():
    values = [0.0, 1.0, 0.0, 1.0, 1.0]
    assert interval(values, "a") == interval(values, "a")


def test_more_values_give_a_narrower_interval():
    (_, low, high), (_, lower, higher) = interval([0.0, 1.0] * 50, "a"), interval([0.0, 1.0] * 5, "a")
    assert high - low < higher - lower
    # Of a hundred throws of a coin, 95 % of the means lie about 0.1 to either side.
    assert (low, high) == (pytest.approx(0.4, abs=0.03), pytest.approx(0.6, abs=0.03))


def test_where_nothing_varies_there_is_nothing_to_doubt():
    assert interval([0.5] * 8, "a") == (0.5, 0.5, 0.5)
