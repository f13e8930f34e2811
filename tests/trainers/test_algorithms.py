"""Who gets the credit in a group."""

import pytest

from loopwright.trainers.grpo import GrpoAlgorithm, GrpoConfig
from loopwright.trainers.rloo import RlooAlgorithm, RlooConfig

REWARDS = {1: 1.0, 2: 0.0, 3: 0.5}


def grpo(**options):
    return GrpoAlgorithm(GrpoConfig(steps=1, **options))


def test_grpo_compares_with_the_mean_in_units_of_the_spread():
    found = grpo().advantages(REWARDS, frozenset(REWARDS))
    assert found == pytest.approx({1: 1.0, 2: -1.0, 3: 0.0}, abs=1e-5)
    assert grpo(std=False).advantages(REWARDS, frozenset(REWARDS)) == {1: 0.5, 2: -0.5, 3: 0.0}


def test_the_baseline_is_over_those_that_count():
    """One that is trained on but does not count has an advantage over the others' mean."""
    found = grpo(std=False).advantages(REWARDS, frozenset({1, 2}))
    assert found == {1: 0.5, 2: -0.5, 3: 0.0}
    found = RlooAlgorithm(RlooConfig(steps=1)).advantages(REWARDS, frozenset({1, 2}))
    assert found == {1: 1.0, 2: -1.0, 3: 0.0}


def test_rloo_leaves_one_out():
    found = RlooAlgorithm(RlooConfig(steps=1)).advantages(REWARDS, frozenset(REWARDS))
    assert found == {1: 0.75, 2: -0.75, 3: 0.0}


@pytest.mark.parametrize("algorithm", [grpo(), RlooAlgorithm(RlooConfig(steps=1))])
def test_nobody_to_compare_with_is_no_advantage_and_no_error(algorithm):
    assert dict(algorithm.advantages({1: 1.0}, frozenset({1}))) == {}
    assert dict(algorithm.advantages({}, frozenset())) == {}


@pytest.mark.parametrize("algorithm", [grpo(), grpo(std=False), RlooAlgorithm(RlooConfig(steps=1))])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_equal_rewards_are_no_advantage(algorithm, size):
    """Not even one of rounding, by which a batch that teaches nothing would move the policy."""
    rewards = dict.fromkeys(range(size), 0.1)
    assert set(algorithm.advantages(rewards, frozenset(rewards)).values()) == {0.0}
