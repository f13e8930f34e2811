"""Rewards: a number with named parts, or nothing. Nothing is never zero, and more is always better."""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from loopwright.core.config import Config
from loopwright.core.expression import Expression
from loopwright.core.outcome import Outcome
from loopwright.core.registry import Registry


@dataclass(frozen=True)
class Reward:
    """What a trial was worth. `more` holds further objectives where a run has several."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    more: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and all(map(math.isfinite, self.more))):
            raise ValueError(f"a reward must be finite, not {self.objectives}")

    @property
    def objectives(self) -> tuple[float, ...]:
        """All objectives, the first one included; each is maximised."""
        return (self.value, *self.more)

    # By value, whatever the parts; rewards with several objectives have no order.
    def __lt__(self, other: "Reward") -> bool:
        return NotImplemented if self.more or other.more else self.value < other.value

    def __le__(self, other: "Reward") -> bool:
        return NotImplemented if self.more or other.more else self.value <= other.value


def mean_reward(rewards: Sequence[Reward | None]) -> Reward | None:
    """The mean over a group's repeats; None if any has none, since the mean of the survivors would be wrong."""
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) < len(rewards) or not scored:
        return None
    if len(scored) == 1:
        return scored[0]
    size = len(scored)
    objectives = [math.fsum(values) / size for values in zip(*(reward.objectives for reward in scored), strict=True)]
    parts = {name: math.fsum(reward.parts.get(name, 0.0) for reward in scored) / size for name in scored[0].parts}
    return Reward(objectives[0], parts, tuple(objectives[1:]))


class Penalties(Config):
    """What an agent learns for a failed trial. These numbers are never rewards and never recorded as such."""

    metric_failure: float | None = None
    """For a trial that crashed, timed out, gave no metric or was invalid; by default it just learns of the failure."""
    constraint_failure: float | None = None
    """For a trial that violates a constraint."""

    def for_outcome(self, outcome: Outcome) -> float | None:
        """The number for one kind of failure."""
        return self.constraint_failure if outcome is Outcome.INFEASIBLE else self.metric_failure


class RewardFunction(Config, ABC):
    """Turns the metrics of a successful trial into a reward; failed trials never reach it.

    class Efficiency(RewardFunction):
        type: Literal["efficiency"] = "efficiency"

        def needs(self) -> set[str]:
            return {"gflops", "watts"}

        def score(self, metrics: Mapping[str, float]) -> Reward:
            return Reward(metrics["gflops"] / metrics["watts"])
    """

    type: str

    @abstractmethod
    def needs(self) -> set[str]:
        """The metrics that this function reads; checked when the scenario is loaded."""

    @abstractmethod
    def score(self, metrics: Mapping[str, float]) -> Reward:
        """The reward. An ArithmeticError or ValueError means that these metrics have none."""

    def label(self) -> str:
        """A short name for tables and axes."""
        return self.type


class _PerMetric(RewardFunction):
    metrics: tuple[str, ...] = Field(min_length=1)
    """The metrics that are added up, each a named part of the reward."""

    _sign: ClassVar[str] = ""
    _part: ClassVar[Callable[[float], float]]
    """What one metric adds to the reward."""

    def needs(self) -> set[str]:
        return set(self.metrics)

    def score(self, metrics: Mapping[str, float]) -> Reward:
        parts = {name: type(self)._part(metrics[name]) for name in self.metrics}
        return Reward(math.fsum(parts.values()), parts)

    def label(self) -> str:
        return " + ".join(f"{self._sign}{name}" for name in self.metrics)


class Identity(_PerMetric):
    """The metric itself: more is better."""

    type: Literal["identity"] = "identity"
    _part: ClassVar[Callable[[float], float]] = staticmethod(operator.pos)


class Negative(_PerMetric):
    """Minus the metric: less is better."""

    type: Literal["negative"] = "negative"
    _sign: ClassVar[str] = "−"
    _part: ClassVar[Callable[[float], float]] = staticmethod(operator.neg)


class Inverse(_PerMetric):
    """One over the metric: less is better, and halving it doubles the reward."""

    type: Literal["inverse"] = "inverse"
    _sign: ClassVar[str] = "1/"
    _part: ClassVar[Callable[[float], float]] = staticmethod(lambda value: 1.0 / value)


class Weighted(RewardFunction):
    """A weighted sum of metrics, each weighted value a named part."""

    type: Literal["weighted"] = "weighted"
    weights: dict[str, float] = Field(min_length=1)
    """Metric to weight; a negative weight makes less better."""

    def needs(self) -> set[str]:
        return set(self.weights)

    def score(self, metrics: Mapping[str, float]) -> Reward:
        parts = {name: weight * metrics[name] for name, weight in self.weights.items()}
        return Reward(math.fsum(parts.values()), parts)

    def label(self) -> str:
        return " + ".join(f"{weight:g}·{name}" for name, weight in self.weights.items())


class ExpressionReward(RewardFunction):
    """An arithmetic expression over the metrics."""

    type: Literal["expression"] = "expression"
    expression: str
    """For example `gflops / watts - 0.1 * seconds`."""

    @field_validator("expression")
    @classmethod
    def _parses(cls, text: str) -> str:
        Expression(text)
        return text

    def needs(self) -> set[str]:
        return set(Expression(self.expression).names)

    def score(self, metrics: Mapping[str, float]) -> Reward:
        return Reward(float(Expression(self.expression)(metrics)))

    def label(self) -> str:
        return self.expression


class ServerReward(RewardFunction):
    """The reward that a live environment's server gives with each step."""

    type: Literal["server"] = "server"

    def needs(self) -> set[str]:
        return set()

    def score(self, metrics: Mapping[str, float]) -> Reward:
        return Reward(metrics["reward"])


class JudgedReward(RewardFunction):
    """The reward that a rollout's judger gave; it comes with the episode and is never made from metrics."""

    type: Literal["judged"] = "judged"

    def needs(self) -> set[str]:
        return set()

    def score(self, metrics: Mapping[str, float]) -> Reward:
        raise ValueError("the judger gave no reward")

    def label(self) -> str:
        return "reward"


@dataclass(frozen=True)
class Objectives:
    """The reward functions of a run side by side: usually one; none for a run that only measures."""

    functions: tuple[RewardFunction, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """One name per objective."""
        return tuple(function.label() for function in self.functions)

    def score(self, metrics: Mapping[str, float]) -> Reward | None:
        """One reward with an objective per function; with several, the parts are named after them."""
        try:
            rewards = [function.score(metrics) for function in self.functions]
        except KeyError as error:
            raise ValueError(f"the metric {error} is missing") from error
        if len(rewards) < 2:
            return rewards[0] if rewards else None
        parts = {label: reward.value for label, reward in zip(self.labels, rewards, strict=True)}
        return Reward(rewards[0].value, parts, tuple(reward.value for reward in rewards[1:]))


rewards: Registry[type[RewardFunction]] = Registry("reward", "loopwright.rewards", RewardFunction)
for _function in (Identity, Negative, Inverse, Weighted, ExpressionReward, ServerReward):
    rewards.add(_function.model_fields["type"].default, _function)
