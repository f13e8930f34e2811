"""Turns what a judger returns into rewards, strictly. A value that is not a reward is a bug: no zero and no retry."""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, TypeVar

from loopwright.core.trial import Reward
from loopwright.rollouts.judgers.base import JudgeFailed

T = TypeVar("T")
_ALLOWED = "a finite number, a bool, a Reward or a dict of named numbers"


class BadVerdict(JudgeFailed, ValueError):
    """A judger returned a number that cannot be a reward, such as NaN."""


class BadVerdictType(JudgeFailed, TypeError):
    """A judger returned something that is not a number."""


def as_reward(value: Any, name: str) -> Reward:
    """What the judger called `name` returned, as a reward; BadVerdict or BadVerdictType if that is impossible."""
    if isinstance(value, Reward):
        if value.more:
            raise BadVerdict(
                f"judger {name!r} returned several objectives; a rollout has one. Return its parts instead"
            )
        parts = {part: _number(number, name) for part, number in value.parts.items()}
        return Reward(_number(value.value, name), parts or {name: value.value})
    if isinstance(value, Mapping):
        if not value or not all(isinstance(part, str) and part for part in value):
            raise BadVerdict(f"judger {name!r} returned {_short(value)}; a dict needs at least one part, each named")
        parts = {part: _number(number, name) for part, number in value.items()}
        return Reward(_sum(parts, name), parts)
    number = _number(value, name)
    return Reward(number, {name: number})


def apply_weight(reward: Reward, weight: float, name: str) -> Reward:
    """The reward and each of its parts times a weight."""
    if weight == 1.0:
        return reward
    value = _finite(weight * reward.value, name)
    return Reward(value, {part: _finite(weight * number, name) for part, number in reward.parts.items()})


def add_rewards(rewards: Mapping[str, Reward], name: str) -> Reward:
    """The sum of the rewards of several judgers, by their labels.

    A reward with one part is called `label`, the parts of others `label.part`.
    """
    parts: dict[str, float] = {}
    for label, reward in rewards.items():
        if len(reward.parts) == 1:
            parts[label] = reward.value
        else:
            parts.update({f"{label}.{part}": number for part, number in reward.parts.items()})
    return Reward(_sum({label: reward.value for label, reward in rewards.items()}, name), parts)


def check_entries(values: Any, name: str, count: int) -> list[Any]:
    """What the judger called `name` returned for several payloads, as a list; BadVerdict if it is not `count` long."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple):
        raise BadVerdictType(f"judger {name!r} returned {type(values).__name__}, not a list with an entry for each")
    if len(values) != count:
        raise BadVerdict(f"judger {name!r} returned {len(values)} entries for {count} episodes")
    return list(values)


def or_failure(function: Callable[..., T], *args: Any) -> T | JudgeFailed:
    """What the function returns, or its JudgeFailed as a value, so that other entries keep their rewards."""
    try:
        return function(*args)
    except JudgeFailed as error:
        return error


def _sum(parts: Mapping[str, float], name: str) -> float:
    try:
        return _finite(math.fsum(parts.values()), name)
    except OverflowError as error:
        raise BadVerdict(f"judger {name!r} returned parts whose sum is too large: {_short(parts)}") from error


def _number(value: Any, name: str) -> float:
    if getattr(value, "shape", None) == ():  # scalars of numpy and torch
        value = value.item()
    if not isinstance(value, Real):
        hint = ". Raise an exception if it cannot give a verdict" if value is None else ""
        raise BadVerdictType(f"judger {name!r} returned {_short(value)}; it must return {_ALLOWED}{hint}")
    try:
        return _finite(float(value), name)
    except OverflowError as error:
        raise BadVerdict(f"judger {name!r} returned a number that is too large; a reward is finite") from error


def _finite(number: float, name: str) -> float:
    if not math.isfinite(number):
        raise BadVerdict(
            f"judger {name!r} returned {number}; a reward is finite. Raise an exception if it cannot give a verdict"
        )
    return number


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
