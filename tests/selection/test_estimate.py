"""Intervals of means: in the unit of the values, with their sign, and as wide as repeats vary."""

from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.selection.estimate import estimate, mean_difference, pooled_spread

positive = st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=6)


def samples(values):
    return [("", value) for value in values]


@given(positive)
def test_intervals_of_positive_values_are_positive(values):
    low, high = estimate(samples(values), {}).interval
    assert 0 <= low <= fmean(values) * (1 + 1e-9)
    assert high >= fmean(values) * (1 - 1e-9)


@given(positive)
def test_a_metric_and_its_negative_have_the_same_interval(values):
    """Given a metric to minimise, its reward is negative, and the interval is the mirror image."""
    low, high = estimate(samples(values), {}).interval
    assert estimate(samples(-value for value in values), {}).interval == pytest.approx((-high, -low))


def test_differences_may_have_either_sign():
    """Given two differences that happen to be positive, their mean may still be negative."""
    low, high = mean_difference(samples([0.1, 2.0]), {}).interval
    assert low < 0 < high


def test_the_spread_of_a_front_is_relative():
    """Given configurations from slow to fast whose noise grows with their speed, each has an interval of its size."""
    random = Random(1)
    groups = [samples(speed * random.uniform(0.9, 1.1) for _ in range(2)) for speed in (5, 20, 80, 320)]
    spread = pooled_spread(groups)
    for group in groups:
        result = estimate(group, {}, len(groups), spread)
        low, high = result.interval
        assert 0.4 * result.mean < low < result.mean < high < 1.8 * result.mean


def test_values_of_both_signs_share_an_absolute_spread():
    groups = [samples([-1.0, 1.0]), samples([99.0, 101.0])]
    spread = pooled_spread(groups)
    widths = [high - low for low, high in (estimate(group, {}, 2, spread).interval for group in groups)]
    assert widths[0] == pytest.approx(widths[1])
