"""Which parameters matter: functional analysis of variance (fANOVA) over a forest of regression trees.

Each tree is fitted to a bootstrap sample of the trials. Its leaves are boxes over the space, so the share of the
variance that one parameter, or two of them together, explain over the whole space is exact for the tree; the spread
over the trees is the uncertainty.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_TREES = 24
_LEAVES = 100
_ROWS = 1000
"""More trials than this make the answer no better, only slower."""
_MIN_ROWS = 12
_PARAMETERS = 16
_BINS = 12


@dataclass(frozen=True)
class Importance:
    """The share of the variance that a parameter, or an interaction of two, explains: its mean and 90 % range."""

    names: tuple[str, ...]
    share: float
    low: float
    high: float


def importances(names: Sequence[str], columns: Sequence[Sequence[Any]], values: Sequence[float]) -> list[Importance]:
    """Parameters and pairs of them, the most important first; empty with too few trials or no variance.

    `columns` holds a value per trial for each name; None means absent.
    """
    if len(values) < _MIN_ROWS or not names:
        return []
    random = np.random.default_rng(0)
    rows = np.arange(len(values))
    if len(rows) > _ROWS:
        rows = np.sort(random.choice(rows, _ROWS, replace=False))
    x = np.column_stack([_positions(column, rows) for column in columns])
    y = np.asarray(values, dtype=np.float64)[rows]
    # A few very bad trials would be all that a tree explains.
    y = np.maximum(y, np.quantile(y, 0.05))
    if np.ptp(y) == 0:
        return []
    if len(names) > _PARAMETERS:  # pairs grow with the square
        strength = [abs(np.corrcoef(x[:, i], y)[0, 1]) if np.ptp(x[:, i]) else 0.0 for i in range(len(names))]
        order = np.sort(np.argsort(strength)[-_PARAMETERS:])
        x, names = x[:, order], [names[i] for i in order]
    shares: dict[tuple[int, ...], list[float]] = {}
    for _ in range(_TREES):
        sample = random.integers(0, len(y), len(y))
        found = {key: share for key, share in _tree_shares(x[sample], y[sample], random).items() if key[1:] == ()}
        # A greedy tree overlooks an interaction beside strong main effects, so these are taken out first.
        rest = _without_main_effects(x[sample], y[sample])
        part = float(rest.var() / y[sample].var()) if np.ptp(y[sample]) else 0.0
        together = _tree_shares(x[sample], rest, random) if part else {}
        found |= {key: part * share for key, share in together.items() if key[1:]}
        for key, share in found.items():
            shares.setdefault(key, []).append(share)
    results = [
        Importance(tuple(names[i] for i in key), float(np.mean(parts)), *map(float, np.quantile(parts, (0.05, 0.95))))
        for key, parts in shares.items()
    ]
    return sorted(results, key=lambda each: -each.share)


def _positions(column: Sequence[Any], rows: npt.NDArray[np.intp]) -> Array:
    """Values as ranks from 0 to 1: a log scale needs no care, and a category has a place."""
    chosen = [column[row] for row in rows]
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in chosen)
    keys = chosen if numeric else [repr(value) for value in chosen]
    _, inverse = np.unique(np.asarray(keys), return_inverse=True)
    return np.asarray((inverse + 0.5) / (inverse.max() + 1), dtype=np.float64)


def _without_main_effects(x: Array, y: Array) -> Array:
    """What is left of the values once each parameter's own effect is subtracted."""
    rest = y - y.mean()
    bins = np.minimum((x * _BINS).astype(np.intp), _BINS - 1)
    for _ in range(3):  # parameters of a search are correlated
        for column in bins.T:
            size = np.maximum(np.bincount(column, minlength=_BINS), 1)
            rest = rest - (np.bincount(column, rest, minlength=_BINS) / size)[column]
    return np.asarray(rest, dtype=np.float64)


def _tree_shares(x: Array, y: Array, random: np.random.Generator) -> dict[tuple[int, ...], float]:
    """The share of a tree's variance by parameter and by pair, beyond what each of the two explains alone."""
    low, high, value = _fit(x, y, random)
    widths = high - low
    volume = widths.prod(axis=1)
    mean = volume @ value
    total = float(volume @ (value - mean) ** 2)
    if total <= 0:
        return {}
    centred = value - mean
    edges = [np.unique(np.concatenate([low[:, i], high[:, i]])) for i in range(x.shape[1])]
    inside = [
        ((low[:, i] <= edge[:-1, None]) & (high[:, i] >= edge[1:, None])).astype(np.float64)
        for i, edge in enumerate(edges)
    ]
    shares: dict[tuple[int, ...], float] = {}
    active = [i for i, edge in enumerate(edges) if len(edge) > 2]
    for i in range(x.shape[1]):
        marginal = inside[i] @ (centred * volume / widths[:, i])
        shares[i,] = float(np.diff(edges[i]) @ marginal**2) / total
    for i, j in combinations(active, 2):
        weight = centred * volume / (widths[:, i] * widths[:, j])
        marginal = (inside[i] * weight) @ inside[j].T
        joint = float(np.diff(edges[i]) @ marginal**2 @ np.diff(edges[j])) / total
        shares[i, j] = max(0.0, joint - shares[i,] - shares[j,])
    return shares


def _fit(x: Array, y: Array, random: np.random.Generator) -> tuple[Array, Array, Array]:
    """The leaves of a regression tree: lower corners, upper corners, means.

    Each split may use a random part of the parameters only, or an interaction without main effects is never met.
    """
    count, width = x.shape
    smallest = max(3, count // _LEAVES)
    queue, leaves = [(np.zeros(width), np.ones(width), np.arange(count))], []
    while queue:
        low, high, rows = queue.pop()
        allowed = random.permutation(width)[: max(1, width * 2 // 3)]
        gain, column, edge = _best_split(x[np.ix_(rows, allowed)], y[rows], smallest)
        if gain <= 0:
            leaves.append((low, high, rows))
            continue
        left, right, parameter = high.copy(), low.copy(), int(allowed[column])
        left[parameter] = right[parameter] = edge
        below = x[rows, parameter] < edge
        queue += [(low, left, rows[below]), (right, high, rows[~below])]
    lows, highs, members = zip(*leaves, strict=True)
    return np.array(lows), np.array(highs), np.array([y[rows].mean() for rows in members])


def _best_split(x: Array, y: Array, smallest: int) -> tuple[float, int, float]:
    """The split that explains most: how much, of which column, where."""
    count = len(y)
    if count < 2 * smallest:
        return 0.0, 0, 0.0
    target = y - y.mean()
    order = np.argsort(x, axis=0, kind="stable")
    ordered = np.take_along_axis(x, order, axis=0)
    sums = np.cumsum(target[order], axis=0)[:-1]
    left = np.arange(1, count)[:, None]
    gains = sums**2 / left + sums**2 / (count - left)
    gains[(ordered[1:] == ordered[:-1]) | (left < smallest) | (count - left < smallest)] = 0.0
    place, parameter = np.unravel_index(int(np.argmax(gains)), gains.shape)
    edge = (ordered[place, parameter] + ordered[place + 1, parameter]) / 2
    return float(gains[place, parameter]), int(parameter), float(edge)
