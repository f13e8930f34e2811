"""Estimates: a mean over measurements under several regimes, with its confidence interval."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, prod, sqrt
from statistics import fmean, variance
from typing import Any

from loopwright.core.confidence import t_quantile
from loopwright.core.trial import Regime, key_of

CONFIDENCE = 0.95
CVAR = 0.2
"""The conditional value at risk is the mean over this share of the worst conditions."""

_FEW = 3
"""With fewer degrees of freedom than this, only the spread of all candidates tells how exact a mean is."""

Sample = tuple[str, float]
"""The key of the regime of a measurement, and its value."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % confidence interval, which is None if there was too little to measure its spread."""

    mean: float
    interval: tuple[float, float] | None
    count: int


class RegimeWeights:
    """How likely each regime is, as the scenario declares it."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        configs, lists = about.get("env_params"), about.get("parameters")
        self._weights: dict[str, dict[str, float]] = {}
        lists = lists if isinstance(lists, dict) else {}
        for name, config in configs.items() if isinstance(configs, dict) else ():
            values = lists.get(name)
            values = values.get("values") if isinstance(values, dict) else values
            weights = config.get("weights") if isinstance(config, dict) else None
            if isinstance(values, list) and isinstance(weights, list) and len(values) == len(weights):
                self._weights[name] = {key_of(value): weight for value, weight in zip(values, weights, strict=True)}

    def __call__(self, regime: Regime) -> float:
        """The weight of a regime; equal for all where none are declared."""
        return prod(weights.get(key_of(regime[name]), 1.0) for name, weights in self._weights.items() if name in regime)


@dataclass(frozen=True)
class Spread:
    """The variance of repeats, pooled over candidates, and its degrees of freedom."""

    variance: float
    freedom: float
    is_relative: bool = False
    """Whether the variance is that of the values divided by their mean."""


def pooled_spread(groups: Iterable[Iterable[Sample]]) -> Spread | None:
    """The spread of repeats under the same regime, over all candidates; None without repeats.

    It is relative where all values have one sign: a candidate that is ten times as fast varies ten times as much.
    """
    strata = [values for samples in groups for values in _by_regime(samples).values()]
    repeated = [values for values in strata if len(values) > 1]
    if not repeated:
        return None
    is_relative = _have_one_sign(strata)
    squares = fsum(
        variance(values) * (len(values) - 1) / (fmean(values) ** 2 if is_relative else 1) for values in repeated
    )
    freedom = sum(len(values) - 1 for values in repeated)
    return Spread(squares / freedom, freedom, is_relative)


def _have_one_sign(strata: Iterable[Iterable[float]]) -> bool:
    values = [value for group in strata for value in group]
    return min(values) > 0 or max(values) < 0


def _by_regime(samples: Iterable[Sample]) -> dict[str, list[float]]:
    strata: dict[str, list[float]] = defaultdict(list)
    for regime, value in samples:
        strata[regime].append(value)
    return strata


@dataclass(frozen=True)
class _Moments:
    """A weighted mean, the variance of that mean, and its degrees of freedom; 0 of them if it has no spread."""

    mean: float
    error: float
    freedom: float
    count: int

    def interval(self, tests: int = 1, *, one_sign: bool = False) -> tuple[float, float] | None:
        """Student's interval. The end towards zero of values that have one sign is on a log scale: it has that sign."""
        if not self.freedom:
            return None
        half = t_quantile(1 - (1 - CONFIDENCE) / 2 / tests, self.freedom) * sqrt(self.error)
        low, high = self.mean - half, self.mean + half
        if one_sign and self.mean > 0:
            low = self.mean * exp(-half / self.mean)
        elif one_sign:
            high = self.mean * exp(half / self.mean)
        return low, high


def estimate(
    samples: Iterable[Sample], weights: Mapping[str, float], tests: int = 1, spread: Spread | None = None
) -> Estimate:
    """The mean over regimes, weighted, of the means under each. The samples are values; see `mean_difference`.

    With several `tests` the interval is wider (Bonferroni), so that it holds for the best of that many candidates.
    A pooled `spread` is the least that is assumed: a winner of a few measurements is often one whose rare bad ones did
    not occur.
    """
    samples = list(samples)
    one_sign = _have_one_sign([[value for _, value in samples]]) if spread is None else spread.is_relative
    moments = _moments(samples, weights, spread)
    return Estimate(moments.mean, moments.interval(tests, one_sign=one_sign), moments.count)


def mean_difference(samples: Iterable[Sample], weights: Mapping[str, float], tests: int = 1) -> Estimate:
    """Like `estimate`, for samples that are differences: their sign says nothing about the sign of their mean."""
    moments = _moments(samples, weights)
    return Estimate(moments.mean, moments.interval(tests), moments.count)


def independent_difference(
    samples: Iterable[Sample], others: Iterable[Sample], weights: Mapping[str, float]
) -> Estimate:
    """How much higher the first mean is than the second, from separate measurements (Welch)."""
    one, two = _moments(samples, weights), _moments(others, weights)
    error, count = one.error + two.error, one.count + two.count
    if not (one.freedom and two.freedom):
        return Estimate(one.mean - two.mean, None, count)
    squares = one.error**2 / one.freedom + two.error**2 / two.freedom
    freedom = error**2 / squares if squares else one.freedom + two.freedom
    return Estimate(one.mean - two.mean, _Moments(one.mean - two.mean, error, freedom, count).interval(), count)


def _moments(samples: Iterable[Sample], weights: Mapping[str, float], spread: Spread | None = None) -> _Moments:
    strata = _by_regime(samples)
    total = fsum(weights.get(regime, 1.0) for regime in strata)
    # Where all weights are 0, every regime counts alike.
    shares = {regime: weights.get(regime, 1.0) / total if total else 1 / len(strata) for regime in strata}
    mean = fsum(share * fmean(strata[regime]) for regime, share in shares.items())
    count = sum(map(len, strata.values()))
    repeated = [values for values in strata.values() if len(values) > 1]
    if repeated:
        freedom = float(sum(len(values) - 1 for values in repeated))
        pooled = fsum(variance(values) * (len(values) - 1) for values in repeated) / freedom
        parts = [
            (shares[regime] ** 2 * (variance(values) if len(values) > 1 else pooled) / len(values), len(values) - 1)
            for regime, values in strata.items()
        ]
    elif count > 1:
        # One measurement under each regime: the spread between regimes is an upper bound for that of repeats.
        freedom, between = count - 1, variance([fmean(values) for values in strata.values()])
        parts = [(share**2 * between, 0) for share in shares.values()]
    else:
        return _Moments(mean, 0.0, 0.0, count)
    error = fsum(part for part, _ in parts)
    # Welch and Satterthwaite: regimes may differ in their spread.
    squares = fsum(part**2 / n for part, n in parts if n)
    if squares and all(n for _, n in parts):
        freedom = min(freedom, max(1.0, error**2 / squares))
    if spread is not None and spread.freedom > freedom:
        least = fsum(
            share**2 * spread.variance * (fmean(strata[regime]) ** 2 if spread.is_relative else 1) / len(strata[regime])
            for regime, share in shares.items()
        )
        error = max(error, least)  # but its own degrees of freedom: a winner's own spread is still uncertain
        if freedom < _FEW:
            freedom = spread.freedom
    return _Moments(mean, error, freedom, count)


def tail_weights(samples: Sequence[Sample], weights: Mapping[str, float], share: float) -> dict[str, float]:
    """The weights of the worst regimes that together make up this share; with 0, the single worst."""
    strata = _by_regime(samples)
    total = fsum(weights.get(regime, 1.0) for regime in strata) or 1.0
    tail: dict[str, float] = {}
    left = share
    for regime in sorted(strata, key=lambda regime: fmean(strata[regime])):
        if tail and left <= 0:
            break
        weight = weights.get(regime, 1.0) / total
        if weight or not any(weights.values()):
            tail[regime] = min(weight, left) or 1.0
            left -= weight
    return tail
