"""The answer of a search: the best action over all its measurements and regimes."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum
from statistics import stdev

from loopwright.core.outcome import Outcome
from loopwright.core.trial import Action, Regime
from loopwright.reports.search.trials import StoredTrial


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


def best_of(trials: Iterable[StoredTrial]) -> Best:
    """The best actions among the trials of a run.

    An action that failed under a regime does not compete there. An action that was measured under more regimes
    precedes one that was measured under fewer.
    """
    measured: dict[str, list[StoredTrial] | StoredTrial] = {}  # almost all actions are measured once
    for trial in trials:
        if counts(trial):
            earlier = measured.setdefault(trial.action_key, trial)
            if isinstance(earlier, list):
                earlier.append(trial)
            elif earlier is not trial:
                measured[trial.action_key] = [earlier, trial]
    front = _Front()
    by_regime: dict[str, tuple[float, list[StoredTrial]]] = {}
    for group in measured.values():
        regimes = _by_regime(group if isinstance(group, list) else [group])
        if regimes:
            front.add(list(regimes.values()))
        for regime, repeats in regimes.items():
            reward = _means([repeats])[0]
            if regime not in by_regime or reward > by_regime[regime][0]:
                by_regime[regime] = reward, repeats
    return Best(tuple(front.candidates()), tuple(_candidate([by_regime[key][1]]) for key in sorted(by_regime)))


def counts(trial: StoredTrial) -> bool:
    """Whether a trial measures its action: it is not a copy of another trial of this run, and not lost."""
    is_copy = trial.cached_from is not None and trial.cached_from.isdigit()
    return trial.outcome not in (None, Outcome.ABORTED, Outcome.LOST) and not is_copy


def _by_regime(trials: list[StoredTrial]) -> dict[str, list[StoredTrial]]:
    """The repeats of an action under each regime in which none of them failed."""
    if len(trials) == 1:
        return {trials[0].regime_key: trials} if trials[0].objectives else {}
    regimes: dict[str, list[StoredTrial]] = defaultdict(list)
    for trial in trials:
        regimes[trial.regime_key].append(trial)
    return {regime: group for regime, group in regimes.items() if all(trial.objectives for trial in group)}


class _Front:
    """The best of the actions that were measured under the most regimes; with several objectives, all of them."""

    def __init__(self) -> None:
        self._widest = 0
        self._actions: list[list[list[StoredTrial]]] = []
        self._best: tuple[float, int] | None = None

    def add(self, regimes: list[list[StoredTrial]]) -> None:
        """Add an action, as its repeats under each regime."""
        if len(regimes) < self._widest:
            return
        if len(regimes) > self._widest:
            self._widest, self._actions, self._best = len(regimes), [], None
        objectives = _means(regimes)
        if len(objectives) > 1:
            self._actions.append(regimes)
        elif self._best is None or (objectives[0], -regimes[0][0].number) > self._best:
            self._best, self._actions = (objectives[0], -regimes[0][0].number), [regimes]

    def candidates(self) -> list[Candidate]:
        """The single best action, or the Pareto front."""
        return pareto([_candidate(regimes) for regimes in self._actions])


def _means(regimes: Sequence[Sequence[StoredTrial]]) -> tuple[float, ...]:
    """Each objective: the mean over regimes of the mean over repeats."""
    if len(regimes) == 1 and len(regimes[0]) == 1:
        return regimes[0][0].objectives
    rewards = [[trial.objectives for trial in group] for group in regimes]
    means = [[fsum(values) / len(group) for values in zip(*group, strict=True)] for group in rewards]
    return tuple(fsum(values) / len(means) for values in zip(*means, strict=True))


def _candidate(regimes: Sequence[Sequence[StoredTrial]]) -> Candidate:
    trials = [trial for group in regimes for trial in group]
    repeats = [trial.objectives[0] for trial in regimes[0]] if len(regimes) == 1 else []
    return Candidate(
        action=trials[0].action,
        objectives=_means(regimes),
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
