"""The plan of a confirmation: how many trials of the budget it may use, on how many finalists, under which regimes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from pydantic import Field

from loopwright.core.config import Config
from loopwright.core.trial import Regime
from loopwright.selection.race import ENOUGH_ROUNDS, MAX_ROUNDS, MIN_ROUNDS
from loopwright.spaces.space import Draws

_MAX_FRONT = 20
_MAX_REGIMES = 1000


class ConfirmConfig(Config):
    """How finalists are measured again before one of them is recommended."""

    finalists: int = Field(default=5, ge=1, le=100)
    """How many of the best configurations are measured again; with several objectives, the whole front is."""
    share: float = Field(default=0.2, gt=0, le=0.5)
    """The part of `trials` that is kept for it."""


LEAST_TRIALS = ceil(2 * MIN_ROUNDS / ConfirmConfig.model_fields["share"].default)
"""A run with fewer trials confirms only if its scenario asks for it."""


@dataclass(frozen=True)
class ConfirmPlan:
    """A confirmation that fits its run. It is recorded with the run, so that reports replay the same race."""

    finalists: int
    limit: int
    """How many trials the confirmation may use."""
    canaries: int
    """How many trials watch the machine during the search."""
    cycle: int
    """How many regimes the finalists are compared over."""
    seed: int
    per_regime: bool
    """Whether the answer is an action for each regime."""

    @property
    def reserve(self) -> int:
        """How many trials the agent cannot use."""
        return self.limit + self.canaries

    def described(self) -> dict[str, Any]:
        """The plan as it is recorded with the run."""
        return asdict(self)


def plan(
    config: ConfirmConfig,
    *,
    trials: int,
    repeats: int,
    regimes: int,
    objectives: int,
    seed: int,
    per_regime: bool,
    required: bool,
) -> ConfirmPlan | None:
    """The plan for a run; None if its budget is too small. A `required` one is made from two trials on."""
    contestants = 1 + max(config.finalists, _MAX_FRONT if objectives > 1 else 0, regimes if per_regime else 0)
    rounds = max(ENOUGH_ROUNDS if objectives > 1 or per_regime else MAX_ROUNDS, 4 * min(regimes, _MAX_REGIMES))
    # The share of the agent stays a multiple of the repeats.
    rows = trials - repeats * ceil((trials - int(trials * config.share + 1e-9)) / repeats)
    canaries = min(rows // 10, MAX_ROUNDS)
    limit = min(rows - canaries, contestants * rounds)
    if limit < (2 if required else 2 * MIN_ROUNDS):
        return None
    return ConfirmPlan(config.finalists, limit, canaries, max(1, min(regimes, limit // 2)), seed, per_regime)


def regimes_of(draws: Draws, cycle: int) -> Sequence[Regime]:
    """The regimes that finalists are compared over: all of them, or the likeliest if there are too many."""
    if draws.count > _MAX_REGIMES:
        drawn = {str(regime): regime for regime in (draws.sample(f"confirm:{n}") for n in range(10 * cycle))}
        return list(drawn.values())[:cycle]
    likely = sorted(draws.weighted(), key=lambda pair: -pair[1])
    return [regime for regime, weight in likely if weight][:cycle]
