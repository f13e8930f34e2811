"""Slots: how cores are divided among parallel trials."""

import pytest

from loopwright.execution.slots import core_sets


@pytest.mark.parametrize(
    ("cores", "count", "expected"),
    [
        ([0, 1, 2, 3], 2, [{0, 1}, {2, 3}]),
        ([0, 2, 5], 2, [{0}, {2}]),
        ([4], 2, [{4}, {4}]),
    ],
)
def test_core_sets_are_equal_and_disjoint_if_possible(cores, count, expected):
    assert core_sets(cores, count) == expected
