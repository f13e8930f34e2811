"""The nouns of the spine: a trial, its result, and what an agent observes and learns from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from loopwright.core.outcome import FAULT_OF, Fault, Outcome
from loopwright.core.reward import Reward

Action = Mapping[str, Any]
Regime = Mapping[str, Any]
Phase = Literal["", "confirm", "canary"]
"""Why a trial was made: proposed by the agent (empty), or to confirm a finalist, or to watch the machine."""


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
