"""The nouns of the spine: an action and its key, a reward, a trial, its result, and what an agent observes and learns.

A reward is a number with named parts, or nothing. Nothing is never zero, and more is always better.
"""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, ClassVar, Literal

import orjson
from pydantic import Field, field_validator

from loopwright.core.config import Config
from loopwright.core.errors import InvalidAction
from loopwright.core.expression import Expression
from loopwright.core.outcome import FAULT_OF, Fault, Outcome
from loopwright.core.registry import Registry

Action = Mapping[str, Any]
Regime = Mapping[str, Any]
Phase = Literal["", "confirm", "canary"]
"""Why a trial was made: proposed by the agent (empty), or to confirm a finalist, or to watch the machine."""
_EXACT = 2**53
"""Beyond this, floats cannot represent every integer."""


def canonical(value: Any) -> Any:
    """The one JSON value for `value`, or InvalidAction if JSON cannot hold it.

    5, 5.0 and numpy's 5 are one value, so that equal actions get equal keys.
    """
    kind = type(value)
    # The types that actions are made of, first: this runs several times per trial.
    if kind is float:
        if value.is_integer() and abs(value) <= _EXACT:
            return int(value)
        if math.isfinite(value):
            return value
    elif (kind is int and -(2**63) <= value < 2**63) or (kind is str and value.isascii()):
        return value
    elif kind is dict:
        return {
            name if type(name) is str and name.isascii() else canonical(str(name)): canonical(value[name])
            for name in sorted(value, key=str)
        }
    elif kind is tuple:
        return [canonical(item) for item in value]
    match value:
        case bool() | None:
            return value
        case str():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise InvalidAction(f"{value!r} is not valid Unicode") from error
            # Not `value` itself: numpy's strings and enumerations are subclasses of str.
            return str.__str__(value)
        case int():
            if not -(2**63) <= value < 2**63:
                raise InvalidAction(f"{value!r} does not fit into 64 bits")
            return int(value)
        case float():
            if not math.isfinite(value):
                raise InvalidAction(f"{value!r} is not a finite number")
            return int(value) if value.is_integer() and abs(value) <= _EXACT else float(value)
        case Mapping():
            return {canonical(str(name)): canonical(value[name]) for name in sorted(value, key=str)}
        case list() | tuple():
            return [canonical(item) for item in value]
        case _ if hasattr(value, "tolist"):  # numpy's scalars and arrays, without importing numpy
            return canonical(value.tolist())
    raise InvalidAction(f"{value!r} of type {type(value).__name__} is not a number, string, boolean, list or table")


def key_of(*parts: Any) -> str:
    """A 128-bit key for canonical values, equal whenever they are equal."""
    return blake2b(orjson.dumps(canonical(parts)), digest_size=16).hexdigest()


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


@dataclass(frozen=True, slots=True)
class Result:
    """How one attempt at a trial ended: metrics if it is `ok`, otherwise the reason and whose fault it was."""

    outcome: Outcome
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    fault: Fault | None = None
    usage: Mapping[str, float] = field(default_factory=dict)
    cached_from: str | None = None
    reward: Reward | None = None
    """Given by a rollout's judger, or computed from the metrics of a search."""
    episode: bytes | None = None
    """A rollout's message graph, stored with its trial."""
    curve: Mapping[str, Any] | None = None
    """The `steps` and `metrics` that the trial reported while it ran, stored with it."""

    def __post_init__(self) -> None:
        if self.outcome is not Outcome.OK:
            if self.fault is None:
                object.__setattr__(self, "fault", FAULT_OF.get(self.outcome))
            # An episode that failed by the policy's own fault is scored all the same.
            if self.episode is None:
                object.__setattr__(self, "metrics", {})
                object.__setattr__(self, "reward", None)


@dataclass(frozen=True, slots=True)
class Trial:
    """One numbered attempt. `outcome` is None while it is in flight."""

    number: int
    action: Action
    key: str
    group: int
    repeat: int = 0
    draw: int | None = None
    regime: Regime = field(default_factory=dict)
    outcome: Outcome | None = None
    fault: Fault | None = None
    reason: str = ""
    reward: Reward | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    usage: Mapping[str, float] = field(default_factory=dict)
    cached_from: str | None = None
    reserved_at: float = 0.0
    finished_at: float | None = None
    noise: Mapping[str, Any] = field(default_factory=dict)
    """What the environment drew of the run's noise; the agent never sees it."""
    phase: Phase = ""

    @property
    def unfinished(self) -> bool:
        """In flight or aborted: it keeps its number and its draw, and is attempted again on resume."""
        return self.outcome in (None, Outcome.ABORTED)


@dataclass(frozen=True, slots=True)
class Observation:
    """What an agent sees before it acts.

    `metrics` always has a slot for each declared metric, empty where the last trial gave none;
    `context` is the regime that the next trial will run under.
    """

    metrics: Mapping[str, float | None]
    context: Regime
    draw: int | None = None
    step: int = 0
    """How many trials of its episode came before it."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """What an agent learns from a trial, or from a group of repeats, whose rewards are then averaged.

    `values` is one number per objective: the reward's, or the penalty set for a failure. None means *failed*.
    """

    trial: int
    action: Action
    reward: Reward | None
    values: tuple[float, ...] | None
    observation: Observation
    previous: Observation
    regime: Regime
    outcome: Outcome
    fault: Fault | None
    done: bool
    group: int
    stopped_at: tuple[int, float] | None = None
    """The last step of a `stopped` trial and its metric there, negated if lower is better."""
    phase: Phase = ""
    """Agents learn only from trials without a phase."""
    terminated: bool = True
    """Whether the trial was the last one of its episode."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """An earlier proposal, read back from the ledger, with the agent's note and the feedback if there is any."""

    group: int
    action: Action
    regime: Regime
    note: Mapping[str, Any] | None
    feedback: Feedback | None


# -- reward functions --------------------------------------------------------------------------------------------------


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

    def scored(self, result: Result) -> Result:
        """The result of a successful trial with its reward; `metric_missing` if its metrics have none."""
        try:
            outcome, reason, reward = result.outcome, result.reason, self.score(result.metrics)
        except (ArithmeticError, ValueError, TypeError, KeyError) as error:
            outcome, reward = Outcome.METRIC_MISSING, None
            reason = f"the metrics {dict(result.metrics)} have no reward: {error}"
        # Not `replace`, which takes five times as long.
        return Result(
            outcome,
            result.metrics,
            reason,
            result.fault,
            result.usage,
            result.cached_from,
            reward,
            result.episode,
            result.curve,
        )


rewards: Registry[type[RewardFunction]] = Registry("reward", "loopwright.rewards", RewardFunction)
for _function in (Identity, Negative, Inverse, Weighted, ExpressionReward, ServerReward):
    rewards.add(_function.model_fields["type"].default, _function)
