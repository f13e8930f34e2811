"""Statistics of returns: intervals of differences, and aggregates over several seeds as rliable defines them.

Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice", 2021.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from random import Random
from statistics import fmean, variance

from loopwright.core.confidence import t_quantile

_DRAWS = 2000

Scores = Sequence[Sequence[float]]
"""One list of scores per task (a regime, or the whole environment): one score per training run, that is per seed."""


@dataclass(frozen=True)
class Difference:
    """A difference of means with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 or -1 if the interval excludes zero, otherwise 0."""
        return (self.low > 0) - (self.high < 0)


def stratified_difference(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Difference | None:
    """The mean difference of two sides over strata, each with measurements of both; None if nothing tells its error.

    Strata with several measurements give the error of each mean. If every one has a single pair, the strata are the
    sample, which takes at least two of them.
    """
    pairs = [(a, b) for a, b in pairs if a and b]
    changes = [fmean(a) - fmean(b) for a, b in pairs]
    if not changes:
        return None
    mean, sides = fmean(changes), [side for pair in pairs for side in pair]
    if all(len(side) > 1 for side in sides):
        terms = [(variance(side) / len(side), len(side) - 1) for side in sides]
        total = sum(term for term, _ in terms)
        # Welch and Satterthwaite: the degrees of freedom of a sum of unequal variances.
        freedom = total**2 / sum(term**2 / n for term, n in terms) if total else 1
        half = t_quantile(0.975, freedom) * sqrt(total) / len(pairs)
    elif len(changes) > 1:
        half = t_quantile(0.975, len(changes) - 1) * sqrt(variance(changes) / len(changes))
    else:
        return None
    return Difference(mean, mean - half, mean + half)


def interquartile_mean(values: Sequence[float]) -> float:
    """The mean of the middle half: a quarter is left out at either end, rounded down, as scipy's `trim_mean` does."""
    cut = int(0.25 * len(values))
    return fmean(sorted(values)[cut : len(values) - cut])


def aggregate(scores: Scores, statistic: Callable[[Sequence[float]], float] = interquartile_mean) -> Difference:
    """A statistic over all runs and tasks with its 95 % interval, by a bootstrap that is stratified by task."""

    def of(tasks: Scores) -> float:
        return statistic([score for task in tasks for score in task])

    return _with_interval(of(scores), lambda random: of([random.choices(task, k=len(task)) for task in scores]))


def probability_of_improvement(scores: Scores, baseline: Scores) -> Difference:
    """How probable it is that a run is better than one of the baseline, averaged over tasks, with its 95 % interval."""

    def of(ours: Scores, theirs: Scores) -> float:
        return fmean(
            fmean((x > y) + 0.5 * (x == y) for x in task for y in other)
            for task, other in zip(ours, theirs, strict=True)
        )

    def again(random: Random) -> float:
        ours, theirs = ([random.choices(task, k=len(task)) for task in side] for side in (scores, baseline))
        return of(ours, theirs)

    return _with_interval(of(scores, baseline), again)


def _with_interval(value: float, again: Callable[[Random], float]) -> Difference:
    random = Random("bootstrap")
    draws = sorted(again(random) for _ in range(_DRAWS))
    return Difference(value, draws[int(0.025 * _DRAWS)], draws[int(0.975 * _DRAWS) - 1])
