"""The comparison of two campaigns: what changed between them, and how their recommendations and common points differ.

Values are compared over the regimes that both campaigns met, with the weights that the second one declares.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loopwright.core.trial import Action, key_of
from loopwright.ledger.ledger import Ledger
from loopwright.selection.estimate import Estimate, RegimeWeights, estimate, independent_difference, mean_difference
from loopwright.selection.race import samples_of
from loopwright.selection.recommendation import Candidate, Recommendation, recommend
from loopwright.selection.trials import StoredTrial, stored_trials

_SETTINGS = ("workload", "constraints", "env_params", "noise", "objectives", "repeats", "parallel", "confirm", "stop")
_MACHINE = ("host", "cpus", "memory_bytes", "platform", "python", "loopwright", "git")


@dataclass(frozen=True)
class SettingChange:
    """A setting that differs; None where one campaign does not have it."""

    part: str
    """`inputs`, `space`, `agent`, `run` or `machine`."""
    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class RecordedRun:
    """What a comparison needs of one run, read at one moment; the run may still be in progress."""

    name: str
    about: Mapping[str, Any]
    provenance: Mapping[str, Any]
    trials: Sequence[StoredTrial]
    best: Recommendation

    @classmethod
    def read(cls, ledger: Ledger) -> "RecordedRun":
        """The run as its ledger has it now."""
        about = ledger.state("run", {})
        trials = list(stored_trials(ledger))
        return cls(about.get("name", ""), about, ledger.state("provenance", {}), trials, recommend(trials, about))

    @property
    def answer(self) -> Candidate | None:
        """The configuration to deploy; None without one, or if the answer is a front or one for each regime."""
        is_single = len(self.best.front) == 1 and not self.about.get("conditions_on_regime")
        return self.best.front[0] if is_single else None

    @property
    def labels(self) -> list[str]:
        """The names of the objectives."""
        return list(self.about.get("objectives") or ())


@dataclass(frozen=True)
class CommonPoint:
    """A configuration that both campaigns measured; objectives beyond the first are not compared."""

    action: Action
    before: Estimate
    after: Estimate
    difference: Estimate


@dataclass(frozen=True)
class CampaignComparison:
    """Two campaigns side by side. Differences are the second minus the first."""

    before: RecordedRun
    after: RecordedRun
    changes: tuple[SettingChange, ...]
    difference: Estimate | None
    """Between the two recommendations; None if there is nothing to compare, see `obstacle`."""
    obstacle: str
    """Why the recommendations cannot be compared; empty if they can."""
    common: tuple[CommonPoint, ...]
    """The configurations that both measured, the largest difference first."""
    shift: Estimate | None
    """The mean difference over the common configurations: what changed apart from the choice of configuration."""


def compare(before: RecordedRun, after: RecordedRun) -> CampaignComparison:
    """Compare two runs."""
    obstacle = _obstacle(before, after)
    comparable = before.labels == after.labels
    weigh = RegimeWeights(after.about)
    weights = {trial.regime_key: weigh(trial.regime) for trial in after.trials}
    common = _common_points(before.trials, after.trials, weights) if comparable else []
    difference = None
    if not obstacle and before.answer is not None and after.answer is not None:
        one, two = _rows(before, before.answer), _rows(after, after.answer)
        shared = {row.regime_key for row in one} & {row.regime_key for row in two}
        if shared:
            difference = independent_difference(
                samples_of([row for row in two if row.regime_key in shared]),
                samples_of([row for row in one if row.regime_key in shared]),
                weights,
            )
        else:
            obstacle = "they were measured under different regimes"
    return CampaignComparison(
        before,
        after,
        tuple(_changes(before, after)),
        difference,
        obstacle,
        tuple(sorted(common, key=lambda point: -abs(point.difference.mean))),
        # Each configuration counts once: their differences are the samples.
        mean_difference([("", point.difference.mean) for point in common], {}) if common else None,
    )


def _obstacle(before: RecordedRun, after: RecordedRun) -> str:
    """Why two recommendations are not one number each in the same unit."""
    if before.labels != after.labels:
        return f"the objectives differ: {', '.join(before.labels) or 'none'}; {', '.join(after.labels) or 'none'}"
    for place, run in (("first", before), ("second", after)):
        if not run.best.front and not run.best.by_regime:
            return f"the {place} campaign has no successful trial yet"
        if run.answer is None:
            return f"the answer of the {place} campaign is several configurations"
    return ""


def _rows(run: RecordedRun, candidate: Candidate) -> list[StoredTrial]:
    numbers = set(candidate.trials)
    return [trial for trial in run.trials if trial.number in numbers]


def _common_points(
    before: Iterable[StoredTrial], after: Iterable[StoredTrial], weights: Mapping[str, float]
) -> list[CommonPoint]:
    """The configurations that succeeded in both, over the regimes in which both measured them."""
    one, two = _successes(before), _successes(after)
    points = []
    for key in two:
        if key not in one:
            continue
        shared = {row.regime_key for row in one[key]} & {row.regime_key for row in two[key]}
        rows = [[row for row in group if row.regime_key in shared] for group in (one[key], two[key])]
        if shared:
            first, second = (samples_of(group) for group in rows)
            points.append(
                CommonPoint(
                    rows[1][0].action,
                    estimate(first, weights),
                    estimate(second, weights),
                    independent_difference(second, first, weights),
                )
            )
    return points


def _successes(trials: Iterable[StoredTrial]) -> dict[str, list[StoredTrial]]:
    """The measurements of each configuration that has any; the luck of a search is in them, too."""
    groups: dict[str, list[StoredTrial]] = defaultdict(list)
    for trial in trials:
        if trial.objectives and trial.counts:
            groups[key_of(trial.action)].append(trial)
    return groups


def _changes(before: RecordedRun, after: RecordedRun) -> Iterable[SettingChange]:
    """Every recorded setting that differs."""
    one, two = before.about, after.about
    if one.get("fingerprint") != two.get("fingerprint"):
        yield SettingChange("inputs", "fingerprint", one.get("fingerprint"), two.get("fingerprint"))
    yield from _table_changes("space", one.get("parameters"), two.get("parameters"))
    yield from _table_changes("agent", one.get("agent"), two.get("agent"))
    for name in _SETTINGS:
        if isinstance(one.get(name), dict) or isinstance(two.get(name), dict):
            for change in _table_changes("run", one.get(name), two.get(name)):
                yield SettingChange("run", f"{name}.{change.name}", change.before, change.after)
        elif one.get(name) != two.get(name):
            yield SettingChange("run", name, one.get(name), two.get(name))
    yield from _table_changes("machine", before.provenance, after.provenance, _MACHINE)


def _table_changes(part: str, one: Any, two: Any, names: Iterable[str] | None = None) -> Iterable[SettingChange]:
    one, two = one if isinstance(one, dict) else {}, two if isinstance(two, dict) else {}
    for name in dict.fromkeys([*one, *two]) if names is None else names:
        if one.get(name) != two.get(name):
            yield SettingChange(part, name, one.get(name), two.get(name))
