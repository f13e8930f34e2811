"""What a judger may return, and how it becomes a reward. A breach is a bug: never a zero, nor tried again."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from loopwright.core.reward import Reward
from loopwright.rollouts.judgers.base import JudgeFailed

_ALLOWED = "a finite number, a bool, a Reward or a dict of named numbers"


class BadVerdict(JudgeFailed, ValueError):
    """A judger returned a value that is no reward, such as NaN."""


class BadVerdictType(JudgeFailed, TypeError):
    """A judger returned something that is not even a number."""


Breach = BadVerdict | BadVerdictType


def as_reward(value: Any, name: str) -> Reward:
    """The reward that a judger called `name` meant; a breach raises a TypeError or ValueError that says so."""
    if isinstance(value, Reward):
        if value.more:
            raise BadVerdict(
                f"judger {name!r} returned several objectives; a rollout has one. Return its parts instead"
            )
        parts = {part: _number(number, name) for part, number in value.parts.items()}
        return Reward(_number(value.value, name), parts or {name: value.value})
    if isinstance(value, Mapping):
        if not value or not all(isinstance(part, str) and part for part in value):
            raise BadVerdict(f"judger {name!r} returned {_short(value)}; a dict needs a name for each part, and a part")
        named = {part: _number(number, name) for part, number in value.items()}
        return _sum(named, name)
    number = _number(value, name)
    return Reward(number, {name: number})


def weighted(reward: Reward, weight: float, name: str) -> Reward:
    """The reward times a weight, each part too."""
    if weight == 1.0:
        return reward
    value = _finite(weight * reward.value, name)
    return Reward(value, {part: _finite(weight * number, name) for part, number in reward.parts.items()})


def _sum(parts: Mapping[str, float], name: str) -> Reward:
    try:
        return Reward(_finite(math.fsum(parts.values()), name), parts)
    except OverflowError as error:
        raise BadVerdict(f"judger {name!r} returned parts whose sum is too large: {_short(parts)}") from error


def added(rewards: Mapping[str, Reward], name: str) -> Reward:
    """The sum of named rewards. One with a single part goes by its judger's name, several by `judger.part`."""
    parts: dict[str, float] = {}
    for label, reward in rewards.items():
        if len(reward.parts) == 1:
            parts[label] = reward.value
        else:
            parts.update({f"{label}.{part}": number for part, number in reward.parts.items()})
    return Reward(_sum({label: reward.value for label, reward in rewards.items()}, name).value, parts)


def _number(value: Any, name: str) -> float:
    if getattr(value, "shape", None) == ():  # numpy's and torch's scalars
        value = value.item()
    if not isinstance(value, Real):
        hint = ". Raise an exception where there is no verdict" if value is None else ""
        raise BadVerdictType(f"judger {name!r} returned {_short(value)}; it must return {_ALLOWED}{hint}")
    try:
        return _finite(float(value), name)
    except OverflowError as error:
        raise BadVerdict(f"judger {name!r} returned a number that is too large; a reward is finite") from error


def _finite(number: float, name: str) -> float:
    if not math.isfinite(number):
        raise BadVerdict(
            f"judger {name!r} returned {number}; a reward is finite. Raise an exception where there is none"
        )
    return number


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
