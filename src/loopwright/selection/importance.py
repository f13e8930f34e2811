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
_EDGES = 60
"""A tree splits a parameter at one of this many places; a multiple of most numbers of candidates."""


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
    samples = random.integers(0, len(y), (_TREES, len(y)))
    # A greedy tree overlooks an interaction beside strong main effects, so each sample has another tree without these.
    rest = np.stack([_without_main_effects(x[sample], y[sample]) for sample in samples])
    trees = _fit(np.concatenate([x[samples]] * 2), np.concatenate([y[samples], rest]), random)
    for number, sample in enumerate(samples):
        part = float(rest[number].var() / y[sample].var()) if np.ptp(y[sample]) else 0.0
        together = _tree_shares(*trees[_TREES + number]) if part else {}
        found = {key: share for key, share in _tree_shares(*trees[number]).items() if not key[1:]}
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


def _tree_shares(low: Array, high: Array, value: Array) -> dict[tuple[int, ...], float]:
    """The share of a tree's variance by parameter and by pair, beyond what each of the two explains alone."""
    widths = high - low
    volume = widths.prod(axis=1)
    mean = volume @ value
    total = float(volume @ (value - mean) ** 2)
    if total <= 0:
        return {}
    centred = value - mean
    edges = [np.unique(np.concatenate([low[:, i], high[:, i]])) for i in range(low.shape[1])]
    inside = [
        ((low[:, i] <= edge[:-1, None]) & (high[:, i] >= edge[1:, None])).astype(np.float64)
        for i, edge in enumerate(edges)
    ]
    shares: dict[tuple[int, ...], float] = {}
    active = [i for i, edge in enumerate(edges) if len(edge) > 2]
    for i in range(low.shape[1]):
        marginal = inside[i] @ (centred * volume / widths[:, i])
        shares[i,] = float(np.diff(edges[i]) @ marginal**2) / total
    for i, j in combinations(active, 2):
        weight = centred * volume / (widths[:, i] * widths[:, j])
        marginal = (inside[i] * weight) @ inside[j].T
        joint = float(np.diff(edges[i]) @ marginal**2 @ np.diff(edges[j])) / total
        shares[i, j] = max(0.0, joint - shares[i,] - shares[j,])
    return shares


def _fit(x: Array, y: Array, random: np.random.Generator) -> list[tuple[Array, Array, Array]]:
    """A regression tree for each sample: the lower corners, the upper corners and the means of its leaves.

    All nodes of a level, of all trees, are split at once. Each split may use a random part of the parameters only, or
    an interaction without main effects is never met.
    """
    trees, count, width = x.shape
    smallest, allowed = max(3, count // _LEAVES), max(1, width * 2 // 3)
    codes = np.minimum((x.reshape(-1, width) * _EDGES).astype(np.intp), _EDGES - 1)
    values, target = y.ravel(), (y - y.mean(axis=1, keepdims=True)).ravel()
    tree, low, high = np.arange(trees), np.zeros((trees, width)), np.ones((trees, width))
    node = np.repeat(tree, count)
    leaves: list[tuple[npt.NDArray[np.intp], Array, Array, Array]] = []
    while len(tree):
        gains = _gains(codes, target, node, len(tree), smallest)
        gains[random.random((len(tree), width)).argsort(axis=1) >= allowed] = 0.0
        best = gains.reshape(len(tree), -1).argmax(axis=1)
        column, edge = best // _EDGES, best % _EDGES
        is_split = gains[np.arange(len(tree)), column, edge] > 1e-12
        means = np.bincount(node, values, len(tree)) / np.bincount(node, minlength=len(tree))
        leaves.append((tree[~is_split], low[~is_split], high[~is_split], means[~is_split]))
        # The children of the others: those below the edge, then those above.
        rows, parents = is_split[node], np.flatnonzero(is_split)
        codes, values, target, node = codes[rows], values[rows], target[rows], node[rows]
        above = codes[np.arange(len(node)), column[node]] > edge[node]
        node = (np.cumsum(is_split) - 1)[node] + above * len(parents)
        tree, left, right = np.tile(tree[parents], 2), high[parents], low[parents]
        place = (np.arange(len(parents)), column[parents])
        left[place] = right[place] = (edge[parents] + 1) / _EDGES
        low, high = np.concatenate([low[parents], right]), np.concatenate([left, high[parents]])
    owner, *corners_and_means = (np.concatenate(parts) for parts in zip(*leaves, strict=True))
    low, high, means = corners_and_means
    return [(low[own], high[own], means[own]) for own in (owner == number for number in range(trees))]


def _gains(codes: npt.NDArray[np.intp], target: Array, node: npt.NDArray[np.intp], nodes: int, smallest: int) -> Array:
    """How much a split of each node explains, by column and by the edge after each code; 0 where it is too small."""
    width = codes.shape[1]
    cells = ((node[:, None] * width + np.arange(width)) * _EDGES + codes).ravel()
    shape = (nodes, width, _EDGES)
    left = np.bincount(cells, minlength=nodes * width * _EDGES).reshape(shape).cumsum(axis=2)
    sums = np.bincount(cells, np.repeat(target, width), nodes * width * _EDGES).reshape(shape).cumsum(axis=2)
    count, total = left[:, :, -1:], sums[:, :, -1:]
    right = count - left
    with np.errstate(divide="ignore", invalid="ignore"):
        gains = sums**2 / left + (total - sums) ** 2 / right - total**2 / count
    gains[(left < smallest) | (right < smallest)] = 0.0
    return np.asarray(gains, dtype=np.float64)
