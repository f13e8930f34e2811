"""The answer of a search in a few words, and how much better it is than the start."""

from loopwright.reports.formatting import measured, number
from loopwright.reports.search.digest import Digest


def headline(digest: Digest) -> str:
    """The answer in a few words, for the list of runs."""
    if not digest.ok:
        return "no trial succeeded" if digest.trials else "no trial yet"
    if digest.policy is not None:
        return digest.policy.verdict(digest.labels[0])
    if digest.by_regime:
        return f"an action for each of {number(len(digest.best.by_regime))} regimes"
    if len(digest.best.front) == 1:
        return measured(digest.best.front[0].reward, digest.labels[0])
    return f"{number(len(digest.best.front))} actions, none better in all objectives" if digest.best.front else "–"


def gain(first: float, best: float, label: str = "") -> str:
    """How much better: a factor or a percentage where these make sense, otherwise the difference."""
    if first > 0 and best >= 2 * first:
        return f"{best / first:.3g} ×"
    if first * best > 0:
        return f"+{100 * (best - first) / abs(first):.3g} %"
    return f"+{measured(best - first, label)}"
