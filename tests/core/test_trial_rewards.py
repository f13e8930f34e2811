"""Rewards: a number with named parts, or nothing."""

import math

import pytest
from pydantic import ValidationError

from loopwright.core.trial import (
    ExpressionReward,
    Identity,
    Inverse,
    Negative,
    Objectives,
    Reward,
    Weighted,
    mean_reward,
    rewards,
)

METRICS = {"seconds": 4.0, "watts": 10.0}


@pytest.mark.parametrize(
    ("function", "value", "parts", "label"),
    [
        (Identity(metrics=("seconds",)), 4.0, {"seconds": 4.0}, "seconds"),
        (Negative(metrics=("seconds",)), -4.0, {"seconds": -4.0}, "−seconds"),
        (Inverse(metrics=("seconds",)), 0.25, {"seconds": 0.25}, "1/seconds"),
        (Identity(metrics=("seconds", "watts")), 14.0, {"seconds": 4.0, "watts": 10.0}, "seconds + watts"),
        (Weighted(weights={"seconds": -1, "watts": 0.5}), 1.0, {"seconds": -4, "watts": 5}, "-1·seconds + 0.5·watts"),
        (ExpressionReward(expression="watts / seconds"), 2.5, {}, "watts / seconds"),
    ],
)
def test_each_function_scores_names_its_parts_and_itself(function, value, parts, label):
    assert function.score(METRICS) == Reward(value, parts)
    assert function.label() == label
    assert function.needs() <= METRICS.keys()


def test_every_function_is_found_by_the_name_that_a_scenario_uses():
    assert {"identity", "negative", "inverse", "weighted", "expression"} <= set(rewards)
    assert [rewards.get(name).model_fields["type"].default for name in rewards] == list(rewards)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_is_finite(value):
    with pytest.raises(ValueError, match="finite"):
        Reward(value)
    with pytest.raises(ValueError, match="finite"):
        Reward(1.0, more=(value,))


@pytest.mark.parametrize("expression", ["seconds.__class__", "9 +", "open('x')"])
def test_a_bad_expression_is_refused_at_load_time(expression):
    with pytest.raises(ValidationError):
        ExpressionReward(expression=expression)


def test_several_objectives_are_kept_separate():
    objectives = Objectives((Negative(metrics=("seconds",)), Identity(metrics=("watts",))))
    assert objectives.score(METRICS) == Reward(-4.0, {"−seconds": -4.0, "watts": 10.0}, (10.0,))


def test_a_run_that_only_measures_has_no_reward():
    assert Objectives(()).score(METRICS) is None


def test_the_mean_of_repeats_averages_parts_and_objectives():
    mean = mean_reward([Reward(1.0, {"a": 1.0}, (10.0,)), Reward(3.0, {"a": 3.0}, (30.0,))])
    assert mean == Reward(2.0, {"a": 2.0}, (20.0,))


def test_a_failed_repeat_leaves_no_mean():
    assert mean_reward([Reward(1.0), None]) is None
    assert mean_reward([]) is None
