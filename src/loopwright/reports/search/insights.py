"""What a search teaches beside its answer: which parameters matter, which values fail, and every trial as a row."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import log
from statistics import fmean
from typing import TYPE_CHECKING, Any

from loopwright.core.outcome import Outcome
from loopwright.reports.formatting import evenly, number, short
from loopwright.reports.search.digest import Digest
from loopwright.selection.trials import StoredTrial

if TYPE_CHECKING:
    from loopwright.selection.importance import Importance

TABLE_ROWS = 10_000
"""A table of more trials makes the page slow to open."""
_THINNED = 5000
_BANDS = 5
_FAILURE_ROWS = 15
_STUDIED = 2000
_LEAST = 12
"""Fewer trials say nothing about importance."""


@dataclass(frozen=True)
class FailureRate:
    """How often one value of a parameter, or a band of its range, failed."""

    parameter: str
    value: str
    failed: int
    count: int

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.failed / self.count


@dataclass(frozen=True)
class ObjectiveImportance:
    """What matters for one objective: the parameters by importance, and the five strongest interactions."""

    objective: str
    parameters: "Sequence[Importance]"
    interactions: "Sequence[Importance]"


def important(digest: Digest) -> list[ObjectiveImportance]:
    """What matters for each objective that varies; empty with too few trials."""
    trials = evenly((trial for trial in digest.ok if not trial.phase), _STUDIED)
    if len(trials) < _LEAST:
        return []
    from loopwright.selection.importance import importances  # numpy is heavy

    names = [name for name, is_varied in digest.varied.items() if is_varied]
    actions = [trial.action for trial in trials]
    columns = [[action.get(name) for action in actions] for name in names]
    results = []
    for place, label in enumerate(digest.labels):
        # What the regime explains is not the parameters' doing.
        rewards: dict[str, list[float]] = {}
        for trial in trials:
            rewards.setdefault(trial.regime_key, []).append(trial.objectives[place])
        means = {key: fmean(values) for key, values in rewards.items()}
        values = [trial.objectives[place] - means[trial.regime_key] for trial in trials]
        if shares := importances(names, columns, values):
            pairs = [each for each in shares if len(each.names) == 2 and each.share >= 0.01]
            results.append(ObjectiveImportance(label, [each for each in shares if len(each.names) == 1], pairs[:5]))
    return results


def failure_rates(digest: Digest) -> list[FailureRate]:
    """The values that always fail, then those that fail clearly more often than the rest; at most fifteen."""
    finished = [t for t in digest.trials if t.outcome not in (None, Outcome.ABORTED, Outcome.LOST, Outcome.STOPPED)]
    bad = [trial.outcome is not Outcome.OK for trial in finished]
    if not any(bad) or all(bad):
        return []
    actions = [trial.action for trial in finished]
    overall, rates = sum(bad) / len(bad), []
    for name in dict.fromkeys(name for action in actions for name in action):
        places = _bands([action.get(name) for action in actions], digest.table("parameters").get(name))
        counts, failed = Counter(places), Counter(place for place, is_bad in zip(places, bad, strict=True) if is_bad)
        if len(counts) > 1:
            rates += [FailureRate(name, place, failed[place], count) for place, count in counts.items() if place]
    # Two standard errors above the share of all trials, or without exception.
    clear = [
        rate
        for rate in rates
        if rate.failed == rate.count or rate.share > overall + 2 * (overall * (1 - overall) / rate.count) ** 0.5
    ]
    return sorted(clear, key=lambda rate: (-rate.share, -rate.count))[:_FAILURE_ROWS]


def _bands(values: Sequence[Any], spec: Any) -> list[str]:
    """Each value as text; the values of a range as one of five bands of it. Empty where it is absent."""
    numeric = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if isinstance(spec, list) or len(set(map(repr, values))) <= 2 * _BANDS or len(numeric) < len(values):
        return ["" if value is None else short(value, 60) for value in values]
    low, high = min(numeric), max(numeric)
    is_log = isinstance(spec, dict) and bool(spec.get("log")) and low > 0

    def band(value: float) -> int:
        share = log(value / low) / log(high / low) if is_log else (value - low) / (high - low)
        return min(_BANDS - 1, int(_BANDS * share))

    shares = [n / _BANDS for n in range(_BANDS + 1)]
    ends = [low * (high / low) ** share if is_log else low + (high - low) * share for share in shares]
    texts = [f"{number(ends[n], 3)} to {number(ends[n + 1], 3)}" for n in range(_BANDS)]
    return [texts[band(value)] for value in values]


def trial_table(digest: Digest) -> dict[str, Any]:
    """Every trial as columns for the sortable table; with very many, the best, and an even share of the rest."""
    trials: Sequence[StoredTrial] = digest.trials
    if len(trials) > TABLE_ROWS:
        best = {trial.number for trial in nlargest(_THINNED // 5, digest.ok, key=lambda t: t.objectives[0])}
        rest = evenly((trial for trial in trials if trial.number not in best), _THINNED - len(best))
        trials = sorted([*(t for t in trials if t.number in best), *rest], key=lambda t: t.number)
    objectives = digest.objectives
    actions = [trial.action for trial in trials]
    names = list(dict.fromkeys(name for action in actions for name in action))
    columns: dict[str, list[Any]] = {
        "trial": [trial.number for trial in trials],
        "outcome": [str(trial.outcome or "running") for trial in trials],
    }
    for place, own in enumerate(objectives):
        columns[own.name] = [own.value(t.objectives[place]) if t.objectives else None for t in trials]
    for name in names:
        values = [action.get(name) for action in actions]
        if len(names) <= 3 or any(value != values[0] for value in values):
            columns[name] = [v if isinstance(v, (int, float, str, bool)) or v is None else short(v, 80) for v in values]
    if digest.regimes:
        for name in dict.fromkeys(name for regime in digest.regimes for name in regime):
            columns[name] = [trial.regime.get(name) for trial in trials]
    columns["wall_s"] = [None if trial.wall_s is None else float(f"{trial.wall_s:.4g}") for trial in trials]
    if any(trial.phase for trial in trials):
        columns["phase"] = [trial.phase for trial in trials]
    if any(trial.reason for trial in trials):
        columns["reason"] = [short(trial.reason, 120) for trial in trials]
    return {"names": list(columns), "columns": list(columns.values()), "count": len(digest.trials)}
