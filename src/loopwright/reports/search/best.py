"""The answer of a search: the best action over all its measurements and regimes."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum
from statistics import stdev

from loopwright.core.canonical import key_of
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Action, Regime, Trial


@dataclass(frozen=True)
class Candidate:
    """An action with all its measurements. `spread` is the standard deviation of its repeats."""

    action: Action
    objectives: tuple[float, ...]
    trials: tuple[int, ...]
    spread: float | None
    regimes: tuple[Regime, ...]

    @property
    def reward(self) -> float:
        """The first objective: the mean over regimes of the mean over repeats."""
        return self.objectives[0]


@dataclass(frozen=True)
class Best:
    """`front` is the best action, or the Pareto front; `by_regime` the best action of each regime."""

    front: tuple[Candidate, ...]
    by_regime: tuple[Candidate, ...]


def best_of(trials: Iterable[Trial]) -> Best:
    """The best actions among the trials of a run.

    An action that failed under a regime does not compete there. An action that was measured under more regimes
    precedes one that was measured under fewer.
    """
    measured: dict[str, dict[str, list[Trial]]] = defaultdict(lambda: defaultdict(list))
    for trial in trials:
        if counts(trial):
            measured[key_of(trial.action)][key_of(trial.regime)].append(trial)
    good = [
        {regime: group for regime, group in regimes.items() if all(trial.reward for trial in group)}
        for regimes in measured.values()
    ]
    every = [_candidate(list(regimes.values())) for regimes in good if regimes]
    widest = max((len(candidate.regimes) for candidate in every), default=0)
    front = pareto([candidate for candidate in every if len(candidate.regimes) == widest])
    by_regime: dict[str, Candidate] = {}
    for regimes in good:
        for regime, group in regimes.items():
            candidate = _candidate([group])
            if regime not in by_regime or candidate.reward > by_regime[regime].reward:
                by_regime[regime] = candidate
    return Best(tuple(front), tuple(by_regime[key] for key in sorted(by_regime)))


def counts(trial: Trial) -> bool:
    """Whether a trial measures its action: it is not a copy of another trial of this run, and not lost."""
    is_copy = trial.cached_from is not None and trial.cached_from.isdigit()
    return trial.outcome not in (None, Outcome.ABORTED, Outcome.LOST) and not is_copy


def _candidate(regimes: Sequence[Sequence[Trial]]) -> Candidate:
    # For each regime, the mean of every objective over its repeats.
    rewards = [[trial.reward.objectives for trial in group if trial.reward] for group in regimes]
    means = [[fsum(values) / len(group) for values in zip(*group, strict=True)] for group in rewards]
    trials = [trial for group in regimes for trial in group]
    repeats = [trial.reward.value for trial in regimes[0] if trial.reward] if len(regimes) == 1 else []
    return Candidate(
        action=trials[0].action,
        objectives=tuple(fsum(values) / len(means) for values in zip(*means, strict=True)),
        trials=tuple(trial.number for trial in trials),
        spread=stdev(repeats) if len(repeats) > 1 else None,
        regimes=tuple(group[0].regime for group in regimes),
    )


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that no other one beats; with one objective the single best, and the earliest of equals."""
    if not candidates:
        return []
    if len(candidates[0].objectives) == 1:
        return [max(candidates, key=lambda candidate: (candidate.reward, -candidate.trials[0]))]
    front: list[Candidate] = []
    # In falling order of the first objective, only an earlier one can beat a later one.
    for candidate in sorted(candidates, key=lambda c: (*(-value for value in c.objectives), c.trials[0])):
        if not any(all(a >= b for a, b in zip(o.objectives, candidate.objectives, strict=True)) for o in front):
            front.append(candidate)
    return front
