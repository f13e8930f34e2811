"""Drift: whether the machine itself changed while a search ran, from repeated measurements of one configuration."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import fsum, sqrt
from statistics import fmean

from loopwright.core.confidence import t_quantile
from loopwright.selection.trials import StoredTrial

_LEAST = 5
_CERTAINTY = 0.995
"""One-sided: a steady machine is called drifting in one run of a hundred."""


@dataclass(frozen=True)
class Drift:
    """How much the reward of an unchanged configuration changed from the first to the last of its trials."""

    change: float
    share: float
    """The change relative to the mean."""
    trials: tuple[int, ...]


def drift_of(trials: Iterable[StoredTrial]) -> Drift | None:
    """The drift that measurements of one configuration show; None if it cannot be told from chance.

    Only those under the regime and noise of the first are compared.
    """
    rows = [trial for trial in trials if trial.objectives]
    rows = [trial for trial in rows if (trial.regime_key, trial.noise) == (rows[0].regime_key, rows[0].noise)]
    if len(rows) < _LEAST:
        return None
    middle, mean = fmean(row.number for row in rows), fmean(row.objectives[0] for row in rows)
    width = fsum((row.number - middle) ** 2 for row in rows)
    slope = fsum((row.number - middle) * (row.objectives[0] - mean) for row in rows) / width
    rest = fsum((row.objectives[0] - mean - slope * (row.number - middle)) ** 2 for row in rows)
    error = sqrt(rest / (len(rows) - 2) / width)
    if abs(slope) <= t_quantile(_CERTAINTY, len(rows) - 2) * error:
        return None
    change = slope * (rows[-1].number - rows[0].number)
    return Drift(change, change / abs(mean) if mean else 0.0, tuple(row.number for row in rows))
