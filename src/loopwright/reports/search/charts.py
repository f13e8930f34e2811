"""The chart data of a search: its trials as columns, thinned if there are too many to draw."""

import heapq
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import floor, fsum, log10
from operator import attrgetter
from typing import Any

from loopwright.core.trial import canonical, key_of
from loopwright.reports.formatting import assignments, evenly, exact, short
from loopwright.reports.objective import Objective
from loopwright.reports.search.digest import Digest
from loopwright.reports.search.insights import trial_table
from loopwright.selection.trials import StoredTrial

DRAWN = 5000
"""More points than this are thinned: they slow a browser down and show nothing new."""
_THINNED = 3000
_SKETCHED = 800
_TICKS = 500
_CATEGORIES = 24
COLOURED = 6
"""Up to this many regimes have a colour, a shape and a line each."""


@dataclass
class BestSoFar:
    """The best mean over repeats, trial by trial. A configuration that failed is excluded, as in the answer."""

    repeated: Container[str] = ()
    """What has several trials; what has only one cannot change later, so only the best of those is kept."""
    _single: float | None = None
    _failed: set[str] = field(default_factory=set)
    _means: dict[str, float] = field(default_factory=dict)
    _repeats: dict[str, list[float]] = field(default_factory=dict)
    _heap: list[tuple[float, str]] = field(default_factory=list)

    def add(self, question: str, value: float | None) -> None:
        """Add a measurement, or a failure (None)."""
        if question not in self.repeated:
            if value is not None and (self._single is None or value > self._single):
                self._single = value
            return
        if value is None:
            self._failed.add(question)
            return
        if question in self._means:
            values = self._repeats.setdefault(question, [self._means[question]])
            values.append(value)
            value = fsum(values) / len(values)
        self._means[question] = value
        heapq.heappush(self._heap, (-value, question))

    def value(self) -> float | None:
        """The best mean so far. Means that later repeats changed are dropped."""
        while self._heap:
            mean, question = self._heap[0]
            if question not in self._failed and -mean == self._means[question]:
                return -mean if self._single is None else max(-mean, self._single)
            heapq.heappop(self._heap)
        return self._single


def chart_data(digest: Digest) -> dict[str, Any]:
    """Everything that report.js draws for one run."""
    ok, labels, objectives = digest.ok, digest.labels, digest.objectives
    regimes = {key_of(regime): index for index, regime in enumerate(digest.regimes)}
    lines = [best_lines(digest, objective) for objective in range(len(labels))]
    answer = {number for candidate in digest.best.front for number in candidate.trials}
    if digest.policy is not None:
        answer = digest.policy.policy_trials
    elif digest.by_regime:
        answer = {number for candidate in digest.best.by_regime for number in candidate.trials}
    steps = {point[0] for objective in lines for line in objective for point in line["steps"]}
    indexes = thinned(ok, answer | steps)
    points = [ok[index] for index in indexes]
    failed = [trial for trial in digest.trials if not trial.objectives and not trial.unfinished]
    return {
        "labels": labels,
        "last": digest.trials[-1].number if digest.trials else 0,
        "number": [trial.number for trial in points],
        "rewards": [[own.value(trial.objectives[o]) for trial in points] for o, own in enumerate(objectives)],
        "lower": [objective.is_minimised for objective in objectives],
        "regime": [regimes.get(trial.regime_key) for trial in points],
        "cached": [int(trial.cached_from is not None) for trial in points],
        "answer": [index for index, trial in enumerate(points) if trial.number in answer],
        "sketch": evenly(range(len(points)), _SKETCHED),
        "floors": [_own(own, floor_of([trial.objectives[o] for trial in ok])) for o, own in enumerate(objectives)],
        "lines": lines,
        "regimes": [short(assignments(regime), 60) for regime in digest.regimes],
        "regime_means": _means_by([regimes.get(trial.regime_key) for trial in ok], digest, len(regimes)),
        "parameters": axes(digest, indexes),
        "table": trial_table(digest),
        "failed": ticks((t.number, str(t.outcome), t.reason) for t in failed),
        "curves": digest.evaluations.curves(),
        "steps": digest.evaluations.trials,
        "skipped": [],
    }


def ticks(failed: Iterable[tuple[int, str, str]]) -> list[list[Any]]:
    """Failed trials as (number, outcome, reason); an even share if there are too many."""
    return [[number, outcome, short(reason, 160)] for number, outcome, reason in evenly(failed, _TICKS)]


def best_lines(digest: Digest, objective: int) -> list[dict[str, Any]]:
    """The best so far as steps: one line, or one per regime if there are few."""
    apart = 1 < len(digest.regimes) <= COLOURED
    names = [assignments(regime) for regime in digest.regimes] if apart else [""]
    index = {key_of(regime): number for number, regime in enumerate(digest.regimes)} if apart else {}
    seen, repeated = set[str](), set[str]()
    for trial in digest.trials:
        if trial.counts and not trial.phase:
            question = trial.action_key + trial.regime_key
            (repeated if question in seen else seen).add(question)
    del seen  # in a large run it is large
    races, own = [BestSoFar(repeated) for _ in names], digest.objectives[objective]
    steps: list[list[tuple[int, float | None]]] = [[] for _ in names]
    for _, group in groupby(digest.trials, key=attrgetter("group")):
        for trial in group:
            if trial.counts and not trial.phase:
                value = trial.objectives[objective] if trial.objectives else None
                races[index.get(trial.regime_key, 0)].add(trial.action_key + trial.regime_key, value)
        # Repeats count together: after the group, not after each of them.
        for race, line in zip(races, steps, strict=True):
            value = _own(own, race.value())
            if value != (line[-1][1] if line else None):
                line.append((trial.number, value))
    last = digest.trials[-1].number if digest.trials else 0
    return [
        {"regime": number if apart else None, "steps": [*line, (last, line[-1][1])] if line else []}
        for number, line in enumerate(steps)
    ]


def axes(digest: Digest, indexes: Sequence[int]) -> list[dict[str, Any]]:
    """The parameters that varied, in the order of the scenario, with the positions of the trials to draw."""
    specs = digest.table("parameters")
    names = [name for name in specs if name in digest.varied] + sorted(digest.varied.keys() - set(specs))
    every = (_axis(name, specs.get(name), digest, indexes) for name in names if digest.varied[name])
    return [axis for axis in every if axis is not None]


def thinned(trials: Sequence[StoredTrial], keep: set[int]) -> list[int]:
    """The indexes of the trials to draw: all, or those to keep, the best, and an even share of the rest."""
    if len(trials) <= DRAWN:
        return list(range(len(trials)))
    rewards = [trial.objectives[0] for trial in trials]
    best = heapq.nlargest(_THINNED // 10, reversed(range(len(trials))), rewards.__getitem__)  # of equals the latest
    special = {index for index, trial in enumerate(trials) if trial.number in keep} | set(best)
    rest = [index for index in range(len(trials)) if index not in special]
    return sorted([*special, *evenly(rest, max(0, _THINNED - len(special)))])


def floor_of(rewards: Sequence[float]) -> float | None:
    """Where a reward axis begins, if a few very bad trials would squeeze all others into one line."""
    if len(rewards) < 20:
        return None
    ordered = sorted(rewards)
    low, tenth, high = ordered[0], ordered[len(ordered) // 10], ordered[-1]
    if not tenth - low > 3 * (high - tenth) > 0:
        return None
    # A round number, since it is written on the axis.
    step = 10.0 ** (floor(log10(high - tenth)) - 1)
    return floor((tenth - 0.15 * (high - tenth)) / step) * step


def _own(objective: Objective, reward: float | None) -> float | None:
    return None if reward is None else objective.value(reward)


def _axis(name: str, form: Any, digest: Digest, indexes: Sequence[int]) -> dict[str, Any] | None:
    """One parameter as the axis of a chart: of values, with a log scale or not, or of categories with their means.

    `form` is how the scenario writes it; None for one that it does not name.
    """
    trials, table = digest.ok, form if isinstance(form, dict) else {"values": form}
    is_range, candidates = "low" in table, table.get("values")
    candidates = candidates if isinstance(candidates, list) else []
    # The values of a range are as many as the trials, and only those that are drawn are needed.
    shown_values = [trials[index].action.get(name) for index in indexes]
    values = shown_values if is_range else [trial.action.get(name) for trial in trials]
    distinct = {_same(value): value for value in values if value is not None}
    if len(distinct) < 2:
        return None
    axis = {"name": name, "kind": "value", "categories": (), "means": [], "at": shown_values}
    numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in distinct.values())
    if is_range:
        log = table.get("log") and numeric and all(value > 0 for value in distinct.values())
        return {**axis, "kind": "log" if log else "value"} if numeric else None
    if numeric and (len(candidates) > _CATEGORIES or (not candidates and len(distinct) > 6)):
        return axis
    categories = {_same(canonical(value)): value for value in candidates} | distinct
    if len(categories) > 4 * _CATEGORIES:
        return None
    place = {key: index for index, key in enumerate(categories)}
    positions = [None if value is None else place[_same(value)] for value in values]
    return {
        **axis,
        "kind": "category",
        "categories": tuple(short(exact(value), 80) for value in categories.values()),
        "means": _means_by(positions, digest, len(categories)),
        "at": [positions[index] for index in indexes],
    }


def _means_by(places: Sequence[float | None], digest: Digest, count: int) -> list[float | None]:
    """The mean of the first objective at each of the places 0..count-1, over all ok trials."""
    values: list[list[float]] = [[] for _ in range(count)]
    for place, trial in zip(places, digest.ok, strict=True):
        if count and place is not None:
            values[int(place)].append(digest.objectives[0].value(trial.objectives[0]))
    return [fsum(rewards) / len(rewards) if rewards else None for rewards in values]


def _same(value: Any) -> Any:
    """Equal for equal values; True is not the number 1."""
    return (isinstance(value, bool), value) if isinstance(value, (int, float, str)) else key_of(value)
