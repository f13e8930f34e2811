"""A trained policy beside the best static action, regime by regime."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from typing import Any

from loopwright.core.trial import Regime
from loopwright.reports.formatting import number
from loopwright.reports.live.statistics import (
    Difference,
    aggregate,
    probability_of_improvement,
    stratified_difference,
)
from loopwright.reports.objective import Objective


@dataclass(frozen=True)
class PolicySide:
    """What the policy, or the static action, did under a regime. `reward` is None if a measurement failed."""

    action: Mapping[str, Any]
    reward: float | None
    trials: tuple[int, ...]
    rewards: tuple[float, ...] = ()
    """The single measurements, if none failed."""


@dataclass(frozen=True)
class PolicyComparison:
    """The evaluation at the end of a training."""

    rows: tuple[tuple[Regime, PolicySide, PolicySide | None], ...]
    seeds: tuple["PolicyComparison", ...] = ()
    """With several seeds, the comparison of each; this one is that of the best."""

    def _scores(self, side: int) -> list[list[float]] | None:
        """Of the policy (0) or the static action (1): a list per regime, in it a mean per seed; None if one failed."""
        scores = [[pair[side] for pair in one.common] for one in self.seeds]
        if len(scores) < 2 or any(len(one) < len(self.rows) for one in scores):
            return None
        return [list(regime) for regime in zip(*scores, strict=True)]

    @cached_property
    def interquartile_mean(self) -> Difference | None:
        """Of the policies of all seeds over the regimes, with its stratified bootstrap interval."""
        scores = self._scores(0)
        return None if scores is None else aggregate(scores)

    @cached_property
    def improvement(self) -> Difference | None:
        """The probability that a trained policy is better than the static action, with its interval."""
        policy, static = self._scores(0), self._scores(1)
        return None if policy is None or static is None else probability_of_improvement(policy, static)

    @cached_property
    def common(self) -> list[tuple[float, float]]:
        """(policy, static) under each regime where both were measured: only these can be compared."""
        pairs = ((policy.reward, static.reward) for _, policy, static in self.rows if static is not None)
        return [(policy, static) for policy, static in pairs if policy is not None and static is not None]

    @property
    def means(self) -> tuple[float, float] | None:
        """The mean over those regimes, of the policy and of the static action."""
        if not self.common:
            return None
        policy, static = zip(*self.common, strict=True)
        return fsum(policy) / len(policy), fsum(static) / len(static)

    @cached_property
    def difference(self) -> Difference | None:
        """Policy minus static action over those regimes, with its interval; None if nothing tells the error."""
        return stratified_difference(
            [
                (policy.rewards or (policy.reward,), static.rewards or (static.reward,))
                for _, policy, static in self.rows
                if static is not None and policy.reward is not None and static.reward is not None
            ]
        )

    @property
    def winner(self) -> int:
        """1 if the policy is better than the static action, -1 if it is worse, 0 if neither is certain."""
        return 0 if self.difference is None else self.difference.sign

    @property
    def higher(self) -> int:
        """Under how many regimes the policy has the higher mean."""
        return sum(policy > static for policy, static in self.common)

    @property
    def alone(self) -> float | None:
        """The policy's own mean, if there is nothing to compare it with."""
        rewards = [policy.reward for _, policy, _ in self.rows if policy.reward is not None]
        return fsum(rewards) / len(rewards) if rewards else None

    @property
    def policy_trials(self) -> set[int]:
        """The trials in which the policy was measured."""
        return {trial for _, policy, _ in self.rows for trial in policy.trials}

    @property
    def static(self) -> Mapping[str, Any]:
        """The static action; it is the same under each regime."""
        return next((static.action for _, _, static in self.rows if static is not None), {})

    @property
    def drawn_names(self) -> list[str]:
        """The drawn parameters."""
        return list(dict.fromkeys(name for regime, _, _ in self.rows for name in regime))

    def chosen_names(self, varied: Sequence[str]) -> list[str]:
        """The parameters that the policy chose; only those that were varied, if any were."""
        names = list(dict.fromkeys(name for _, policy, _ in self.rows for name in policy.action))
        return [name for name in names if name in varied] or names

    def trial_range(self, policy: PolicySide, static: PolicySide | None) -> str:
        """The numbers of the trials behind a row."""
        numbers = sorted({*policy.trials, *(static.trials if static else ())})
        if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
            return f"{number(numbers[0])}–{number(numbers[-1])}"
        return ", ".join(map(number, numbers)) or "–"

    def verdict(self, objective: Objective) -> str:
        """Which of the two wins, in a few words."""
        if self.means is None:
            alone = self.alone
            return "the policy failed under every regime" if alone is None else f"policy {objective.text(alone)}"
        policy, static = self.means
        if (mean := self.interquartile_mean) is not None:
            low, high = sorted((mean.low, mean.high), key=objective.value)
            interval = f"{objective.text(low)} to {objective.text(high)}"
            return f"interquartile mean {objective.text(mean.mean)} ({interval}) over {len(self.seeds)} seeds"
        winner = ("no clear winner", "the policy wins", "the static action wins")[self.winner]
        return f"{winner}: {objective.text(policy)} against {objective.text(static)}"


def comparison(state: Callable[[str], Any]) -> PolicyComparison | None:
    """The comparison in the state of a ledger, with those of each seed; None if the policy was not evaluated."""
    recorded, run = state("policy"), state("run")
    rows = recorded.get("regimes") if isinstance(recorded, dict) else None
    if not isinstance(rows, list) or not rows:
        return None
    names = ((run or {}).get("agent") or {}).get("seeds") or ()
    seeds = [PolicyComparison(_sides(one)) for seed in names if (one := state(f"evaluation {seed}"))]
    return PolicyComparison(_sides(rows), tuple(seeds))


def _sides(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[Regime, PolicySide, PolicySide | None], ...]:
    return tuple(
        (row.get("regime") or {}, _side(row["policy"]), _side(row["static"]) if row.get("static") else None)
        for row in rows
    )


def _side(table: Mapping[str, Any]) -> PolicySide:
    rewards = [reward for reward in table.get("rewards") or () if reward is not None]
    return PolicySide(table.get("action") or {}, table.get("reward"), tuple(table.get("trials") or ()), tuple(rewards))
