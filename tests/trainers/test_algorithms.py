"""The advantages in a group."""

import pytest

from loopwright.trainers.grpo import GrpoAlgorithm, GrpoConfig
from loopwright.trainers.rloo import RlooAlgorithm, RlooConfig

REWARDS = {1: 1.0, 2: 0.0, 3: 0.5}


def grpo(**options):
    return GrpoAlgorithm(GrpoConfig(steps=1, **options))


def test_grpo_advantages_are_normalised_by_the_standard_deviation():
    advantages = grpo().advantages(REWARDS, frozenset(REWARDS))
    assert advantages == pytest.approx({1: 1.0, 2: -1.0, 3: 0.0}, abs=1e-5)
    assert grpo(std=False).advantages(REWARDS, frozenset(REWARDS)) == {1: 0.5, 2: -0.5, 3: 0.0}


def test_the_baseline_uses_only_episodes_that_count():
    """An episode that is trained on but does not count gets its advantage over the others' mean."""
    advantages = grpo(std=False).advantages(REWARDS, frozenset({1, 2}))
    assert advantages == {1: 0.5, 2: -0.5, 3: 0.0}
    advantages = RlooAlgorithm(RlooConfig(steps=1)).advantages(REWARDS, frozenset({1, 2}))
    assert advantages == {1: 1.0, 2: -1.0, 3: 0.0}


def test_rloo_leaves_one_out():
    advantages = RlooAlgorithm(RlooConfig(steps=1)).advantages(REWARDS, frozenset(REWARDS))
    assert advantages == {1: 0.75, 2: -0.75, 3: 0.0}


@pytest.mark.parametrize("algorithm", [grpo(), RlooAlgorithm(RlooConfig(steps=1))])
def test_a_group_of_one_has_no_advantage(algorithm):
    assert dict(algorithm.advantages({1: 1.0}, frozenset({1}))) == {}
    assert dict(algorithm.advantages({}, frozenset())) == {}


@pytest.mark.parametrize("algorithm", [grpo(), grpo(std=False), RlooAlgorithm(RlooConfig(steps=1))])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_equal_rewards_give_no_advantage(algorithm, size):
    """Not even a rounding error, by which a batch without signal would move the policy."""
    rewards = dict.fromkeys(range(size), 0.1)
    assert set(algorithm.advantages(rewards, frozenset(rewards)).values()) == {0.0}
