"""Regret: by how much the configuration that an agent would deploy is worse than the best that was recorded."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from loopwright.core.trial import Action, Regime, Trial, key_of
from loopwright.envs.replay import Recording
from loopwright.selection.estimate import RegimeWeights

CLOSED = 0.95
"""The share of the regret of a random choice that an agent should have removed."""


@dataclass(frozen=True)
class RegretCurves:
    """The regret of one agent after each trial, one curve per seed."""

    agent: str
    curves: tuple[tuple[float, ...], ...]
    estimated: float
    """The share of the trials that the model answered."""
    steps_per_s: float

    def band(self) -> list[tuple[float, float, float]]:
        """After each trial, the 10 % quantile, the median and the 90 % quantile over the seeds."""
        length = min(map(len, self.curves), default=0)
        columns = np.array([curve[:length] for curve in self.curves])
        return [(float(low), float(mid), float(high)) for low, mid, high in np.quantile(columns, (0.1, 0.5, 0.9), 0).T]

    def trials_to(self, regret: float) -> int | None:
        """After how many trials at least half of the seeds had no more regret than this; None if never."""
        return next((n for n, (_, middle, _) in enumerate(self.band(), 1) if middle <= regret), None)


class RegretMeter:
    """The regret in the world of a recording, over its regimes with their declared weights."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        weigh = RegimeWeights(recording.about)
        values: dict[str, list[float]] = defaultdict(list)
        regimes: dict[str, Regime] = {}
        for action, regime in recording.points.values():
            if (value := recording.value(action, regime)) is not None:
                regimes[key := key_of(regime)] = regime
                values[key].append(value)
        total = sum(map(weigh, regimes.values()))
        self._weights = {key: weigh(regime) / total if total else 1 / len(regimes) for key, regime in regimes.items()}
        self._best = {key: max(group) for key, group in values.items()}
        self._means = {key: fmean(group) for key, group in values.items()}
        self._regrets: dict[tuple[str, str], float] = {}

    @property
    def best(self) -> float:
        """The best value that was recorded."""
        return sum(weight * self._best[key] for key, weight in self._weights.items())

    @property
    def of_chance(self) -> float:
        """The regret of a random measured configuration."""
        return self.best - sum(weight * self._means[key] for key, weight in self._weights.items())

    def curve(self, trials: Iterable[Trial]) -> list[float]:
        """The regret after each trial of the best mean so far. Until an agent has one, it is that of chance."""
        regret = {key: self._best[key] - self._means[key] for key in self._weights}
        means: dict[str, dict[str, float]] = defaultdict(dict)
        counts: Counter[tuple[str, str]] = Counter()
        leaders: dict[str, str] = {}
        actions: dict[str, Action] = {}
        points: list[float] = []
        for trial in trials:
            regime = key_of(trial.regime)
            if trial.reward is not None and regime in regret:
                here, point = means[regime], key_of(trial.action)
                counts[regime, point] += 1
                earlier = here.get(point, 0.0)
                here[point] = earlier + (trial.reward.value - earlier) / counts[regime, point]
                leader = leaders.get(regime, point)
                if point == leader and here[point] < earlier:
                    leader = max(here, key=here.__getitem__)
                elif here[point] > here[leader]:
                    leader = point
                actions[point] = trial.action
                if leaders.get(regime) != leader:
                    leaders[regime] = leader
                    regret[regime] = self._regret(regime, trial.regime, leader, actions[leader])
            points.append(sum(self._weights[key] * value for key, value in regret.items()))
        return points

    def _regret(self, regime_key: str, regime: Regime, point: str, action: Action) -> float:
        if (regime_key, point) not in self._regrets:
            value = self._recording.value(action, regime)
            # One that fails now and then is no better than chance.
            value = self._means[regime_key] if value is None else value
            self._regrets[regime_key, point] = max(0.0, self._best[regime_key] - value)
        return self._regrets[regime_key, point]
