"""The nouns of the spine: a trial, what measuring it gave, what an agent observes and what it is told."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loopwright.core.outcome import FAULT_OF, Fault, Outcome
from loopwright.core.reward import Reward

Action = Mapping[str, Any]
Regime = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one attempt at a trial: metrics if it is `ok`, otherwise the reason and whose fault it was."""

    outcome: Outcome
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    fault: Fault | None = None
    usage: Mapping[str, float] = field(default_factory=dict)
    cached_from: str | None = None
    reward: Reward | None = None
    """The verdict of a rollout's judger; a search's reward is made from the metrics."""
    episode: bytes | None = None
    """A rollout's message graph, stored beside its trial."""

    def __post_init__(self) -> None:
        if self.outcome is not Outcome.OK:
            if self.fault is None:
                object.__setattr__(self, "fault", FAULT_OF.get(self.outcome))
            # An episode may end badly and be scored all the same, where that was the policy's own doing.
            if self.episode is None:
                object.__setattr__(self, "metrics", {})
                object.__setattr__(self, "reward", None)


@dataclass(frozen=True, slots=True)
class Trial:
    """One numbered attempt to learn something. `outcome` is None while it is in flight."""

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


@dataclass(frozen=True, slots=True)
class Feedback:
    """What an agent is told about a trial, or about a group of repeats, whose rewards are then averaged.

    `told` is the reward's objectives, or the penalty set for a failure, or None: *failed*.
    """

    trial: int
    action: Action
    reward: Reward | None
    told: tuple[float, ...] | None
    observation: Observation
    previous: Observation
    regime: Regime
    outcome: Outcome
    fault: Fault | None
    done: bool
    group: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """What an agent once proposed, read back from the ledger: with the note it left, and feedback if there is any."""

    group: int
    action: Action
    regime: Regime
    note: Mapping[str, Any] | None
    feedback: Feedback | None
