"""The answer of a search: what to deploy, how sure that is, and what it is compared with, from the ledger alone.

Where finalists were confirmed, only those fresh measurements count: the trials of the search chose the finalists, so
their luck is in their numbers. Otherwise the answer is the best mean of the search.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from statistics import fmean, stdev
from typing import Any

from loopwright.core.trial import Action, Regime
from loopwright.selection.drift import Drift, drift_of
from loopwright.selection.estimate import CVAR, Estimate, RegimeWeights, Spread, estimate, pooled_spread, tail_weights
from loopwright.selection.race import RaceRules, difference, samples_of, standing
from loopwright.selection.trials import StoredTrial

Group = Sequence[Sequence[StoredTrial]]
"""The measurements of an action: its repeats under each regime."""


@dataclass(frozen=True)
class Candidate:
    """An action with its measurements. `spread` is the standard deviation of its repeats."""

    action: Action
    objectives: tuple[float, ...]
    """Each is the weighted mean over regimes of the mean over repeats."""
    trials: tuple[int, ...]
    """The trials that the numbers come from."""
    spread: float | None
    regimes: tuple[Regime, ...]
    intervals: tuple[tuple[float, float] | None, ...]
    """The 95 % confidence interval of each objective; None if it was measured once."""
    confirmed: bool = False
    """Whether the numbers come from fresh measurements, after the search."""


@dataclass(frozen=True)
class RobustChoice:
    """The best action by another rule than the mean over regimes."""

    rule: str
    """`CVaR`: the mean over the worst fifth of the conditions; `worst case`: the mean under the worst regime."""
    action: Action
    estimate: Estimate
    trials: tuple[int, ...]


@dataclass(frozen=True)
class Luckiest:
    """The best single trial of the search, and what its action gave when it was measured again."""

    trial: int
    reward: float
    confirmed: Estimate

    @property
    def shortfall(self) -> float:
        """By how much the trial would have disappointed."""
        return self.reward - self.confirmed.mean


@dataclass(frozen=True)
class Recommendation:
    """`front` is the action to deploy, or the Pareto front; `by_regime` the best action of each regime."""

    front: tuple[Candidate, ...]
    by_regime: tuple[Candidate, ...]
    robust: tuple[RobustChoice, ...] = ()
    """The best CVaR and the best worst case, if there are several regimes."""
    baseline: Candidate | None = None
    """The first or pinned configuration, measured again beside the finalists."""
    gain: Estimate | None = None
    """How much better the recommendation is than the baseline, by pairs under the same regime and noise."""
    luckiest: Luckiest | None = None
    drift: Drift | None = None
    """How much the machine changed while the search ran, if that can be told from chance."""


def recommend(trials: Iterable[StoredTrial], about: Mapping[str, Any] | None = None) -> Recommendation:
    """The recommendation for a run, from its trials and its description in the ledger."""
    about = about or {}
    weigh = RegimeWeights(about) if about.get("env_params") else None
    weights: dict[str, float] = {}  # of each regime that was met, by its key
    measured: dict[str, list[StoredTrial] | StoredTrial] = {}  # almost all actions are measured once
    fresh: dict[str, list[StoredTrial]] = {}
    canaries: list[StoredTrial] = []
    baseline: str | None = None
    for trial in trials:
        if trial.phase == "confirm":
            fresh.setdefault(trial.action_key, []).append(trial)
        elif trial.phase == "canary":
            canaries.append(trial)
            continue
        elif not trial.counts:
            continue
        if trial.regime_key not in weights:
            weights[trial.regime_key] = 1.0 if weigh is None else weigh(trial.regime)
        if trial.phase:
            continue
        if baseline is None and trial.objectives:
            baseline = trial.action_key
        earlier = measured.setdefault(trial.action_key, trial)
        if isinstance(earlier, list):
            earlier.append(trial)
        elif earlier is not trial:
            measured[trial.action_key] = [earlier, trial]
    if any(row.objectives for rows in fresh.values() for row in rows):
        confirmed = _confirmed(measured, fresh, baseline, weights, confirm_rules(about))
        if confirmed.front:
            return replace(confirmed, drift=_drift(baseline, measured, canaries, fresh))
    for key, rows in fresh.items():
        if any(not row.objectives and not row.is_lost for row in rows):
            measured.pop(key, None)  # it failed when it was measured again
    return _from_search(measured, weights)


def confirm_rules(about: Mapping[str, Any]) -> Mapping[str, Any]:
    """How the run confirms, from its description; empty if it does not."""
    rules = about.get("confirm")
    return rules if isinstance(rules, dict) else {}


def race_rules(baseline: str | None, weights: Mapping[str, float], rules: Mapping[str, Any], width: int) -> RaceRules:
    """The rules of a run's race, from its description; `width` is how many objectives there are."""
    return RaceRules(
        baseline,
        int(rules.get("limit", 0)),
        weights,
        cycle=int(rules.get("cycle", 1)),
        seed=int(rules.get("seed", 0)),
        drops=width == 1 and not rules.get("per_regime"),
    )


def _from_search(
    measured: Mapping[str, list[StoredTrial] | StoredTrial], weights: Mapping[str, float]
) -> Recommendation:
    """The recommendation from the trials of the search: of the actions measured under the common regimes, the best, or
    with several objectives the Pareto front.
    """
    common = frozenset(weights) if len(weights) == 1 else _common_regimes(measured.values(), weights)
    robust = _Robust(weights) if len(common) > 1 else None
    by_regime: dict[str, tuple[float, list[StoredTrial]]] = {}
    best: tuple[float, int] | None = None
    front: list[Group] = []
    leaders: dict[str, float] = {}
    for group in measured.values():
        if not isinstance(group, list) and len(group.objectives) < 2:
            # Almost all actions of a large search are measured once, and worse than an earlier one.
            leader = leaders.get(group.regime_key)
            if not group.objectives or (leader is not None and group.objectives[0] <= leader):
                continue
            leaders[group.regime_key] = group.objectives[0]
        regimes = _by_regime(group if isinstance(group, list) else [group])
        if regimes and common <= regimes.keys():
            shared = [regimes[key] for key in regimes if key in common]
            trials = [trial for repeats in shared for trial in repeats]
            # The weighted mean over regimes of the mean over repeats.
            mean = trials[0].objectives[0] if len(trials) == 1 else estimate(samples_of(trials), weights).mean
            rank = mean, -trials[0].number
            if len(trials[0].objectives) > 1:
                front.append(shared)
            elif best is None or rank > best:
                best, front = rank, [shared]
            if robust is not None:
                robust.add(shared)
        for regime, repeats in regimes.items():
            reward = fmean(trial.objectives[0] for trial in repeats)
            if regime not in by_regime or reward > by_regime[regime][0]:
                by_regime[regime] = reward, repeats
    candidates = [_candidate(regimes, weights) for regimes in front]
    return Recommendation(
        tuple(candidates if len(candidates) < 2 else pareto(candidates)),
        tuple(_candidate([by_regime[key][1]], weights) for key in sorted(by_regime)),
        () if robust is None else tuple(robust.choices()),
    )


def _confirmed(
    measured: Mapping[str, list[StoredTrial] | StoredTrial],
    fresh: Mapping[str, Sequence[StoredTrial]],
    baseline: str | None,
    weights: Mapping[str, float],
    rules: Mapping[str, Any],
) -> Recommendation:
    """The recommendation from the fresh measurements alone."""
    width = max(len(row.objectives) for rows in fresh.values() for row in rows)
    race = standing(fresh, race_rules(baseline, weights, rules, width))
    spreads = [pooled_spread(samples_of(rows, o) for rows in fresh.values()) for o in range(width)]
    robust = _Robust(weights, tests=len(fresh), spread=spreads[0])
    groups: dict[str, Group] = {}
    by_regime: dict[str, tuple[float, list[StoredTrial]]] = {}
    for key in fresh:
        regimes = _by_regime([row for row in fresh[key] if not row.is_lost])
        for regime, repeats in regimes.items():
            reward = fmean(trial.objectives[0] for trial in repeats)
            if regime not in by_regime or reward > by_regime[regime][0]:
                by_regime[regime] = reward, repeats
        groups[key] = list(regimes.values())
    # Not those without a result yet, nor those that failed after the race.
    alive = [key for key in race.alive if groups[key]]
    widest = max(map(len, groups.values()))
    for group in groups.values():
        # Those that dropped out by their mean may still be the best in the worst case.
        if len(group) == widest > 1:
            robust.add(group)
    candidates = {key: _candidate(groups[key], weights, len(fresh), confirmed=True, spreads=spreads) for key in alive}
    ranked = sorted(candidates, key=lambda key: -candidates[key].objectives[0])
    front = pareto(list(candidates.values())) if width > 1 else [candidates[key] for key in ranked[:1]]
    best = ranked[0] if ranked and width == 1 else None
    return Recommendation(
        tuple(front),
        tuple(_candidate([by_regime[key][1]], weights, len(fresh), confirmed=True) for key in sorted(by_regime)),
        tuple(robust.choices()),
        baseline=candidates.get(baseline) if baseline is not None else None,
        gain=(
            difference(fresh[best], fresh[baseline], weights)
            if best is not None and baseline in candidates and best != baseline
            else None
        ),
        luckiest=_luckiest(measured, fresh, weights) if width == 1 else None,
    )


def _drift(
    baseline: str | None,
    measured: Mapping[str, list[StoredTrial] | StoredTrial],
    canaries: Iterable[StoredTrial],
    fresh: Mapping[str, Iterable[StoredTrial]],
) -> Drift | None:
    """The drift that the baseline shows: its own trials, those made to watch it, and those beside the finalists."""
    if baseline is None:
        return None
    first = measured[baseline]
    again = (trial for trial in canaries if trial.action_key == baseline)
    return drift_of([*(first if isinstance(first, list) else [first]), *again, *fresh.get(baseline, ())])


def _luckiest(
    measured: Mapping[str, list[StoredTrial] | StoredTrial],
    fresh: Mapping[str, Sequence[StoredTrial]],
    weights: Mapping[str, float],
) -> Luckiest | None:
    """The best single trial of the search, if its action was measured again under the same regime."""
    trials = (trial for group in measured.values() for trial in (group if isinstance(group, list) else [group]))
    best = max((t for t in trials if t.objectives), key=lambda t: (t.objectives[0], -t.number), default=None)
    if best is None or best.action_key not in fresh:
        return None
    again = [sample for sample in samples_of(fresh[best.action_key]) if sample[0] == best.regime_key]
    return Luckiest(best.number, best.objectives[0], estimate(again, weights)) if again else None


def _common_regimes(groups: Iterable[list[StoredTrial] | StoredTrial], weights: Mapping[str, float]) -> frozenset[str]:
    """The regimes that actions are compared over: the likeliest set that an action was measured under as a whole."""
    sets: dict[frozenset[str], tuple[int, float]] = {}
    for group in groups:
        regimes = _by_regime(group if isinstance(group, list) else [group])
        best = max((trial.objectives[0] for trials in regimes.values() for trial in trials), default=0.0)
        count, earlier = sets.get(frozenset(regimes), (0, best))
        sets[frozenset(regimes)] = count + 1, max(best, earlier)
    return max(sets, key=lambda s: (fsum(weights[key] for key in s), len(s), sets[s]), default=frozenset())


def _by_regime(trials: list[StoredTrial]) -> dict[str, list[StoredTrial]]:
    """The repeats of an action under each regime in which none of them failed."""
    if len(trials) == 1:
        return {trials[0].regime_key: trials} if trials[0].objectives else {}
    regimes: dict[str, list[StoredTrial]] = defaultdict(list)
    for trial in trials:
        regimes[trial.regime_key].append(trial)
    return {regime: group for regime, group in regimes.items() if all(trial.objectives for trial in group)}


class _Robust:
    """The best actions by CVaR and by their worst case, over the common regimes."""

    def __init__(self, weights: Mapping[str, float], tests: int = 1, spread: Spread | None = None) -> None:
        self._weights, self._tests, self._spread = weights, tests, spread
        self._best: dict[str, RobustChoice] = {}

    def add(self, regimes: Group) -> None:
        """Add an action, as its repeats under each regime."""
        trials = [trial for group in regimes for trial in group]
        samples = samples_of(trials)
        for rule, share in (("CVaR", CVAR), ("worst case", 0.0)):
            tail = tail_weights(samples, self._weights, share)
            value = estimate([sample for sample in samples if sample[0] in tail], tail, self._tests, self._spread)
            if rule not in self._best or value.mean > self._best[rule].estimate.mean:
                numbers = tuple(trial.number for trial in trials if trial.regime_key in tail)
                self._best[rule] = RobustChoice(rule, trials[0].action, value, numbers)

    def choices(self) -> Iterable[RobustChoice]:
        """One per rule."""
        return self._best.values()


def _candidate(
    regimes: Group,
    weights: Mapping[str, float],
    tests: int = 1,
    *,
    confirmed: bool = False,
    spreads: Sequence[Spread | None] = (),
) -> Candidate:
    trials = [trial for group in regimes for trial in group]
    repeats = [trial.objectives[0] for trial in regimes[0]] if len(regimes) == 1 else []
    intervals: tuple[tuple[float, float] | None, ...] = (None,) * len(trials[0].objectives)
    if len(trials) == 1:
        objectives = trials[0].objectives
    else:
        estimates = [
            estimate(samples_of(trials, o), weights, tests, spreads[o] if spreads else None)
            for o in range(len(trials[0].objectives))
        ]
        objectives = tuple(value.mean for value in estimates)
        intervals = tuple(value.interval for value in estimates)
    return Candidate(
        action=trials[0].action,
        objectives=objectives,
        trials=tuple(trial.number for trial in trials),
        spread=stdev(repeats) if len(repeats) > 1 else None,
        regimes=tuple(group[0].regime for group in regimes),
        intervals=intervals,
        confirmed=confirmed,
    )


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that no other one beats; of equals the earliest."""
    front: list[Candidate] = []
    # In falling order of the first objective, only an earlier one can beat a later one.
    for candidate in sorted(candidates, key=lambda c: (*(-value for value in c.objectives), c.trials[0])):
        if not any(all(a >= b for a, b in zip(o.objectives, candidate.objectives, strict=True)) for o in front):
            front.append(candidate)
    return front
