"""The answer of a search in a few words, how sure it is, and how much better it is than the start."""

from loopwright.reports.formatting import counted, measured, number, percent
from loopwright.reports.search.digest import Digest
from loopwright.selection.estimate import Estimate
from loopwright.selection.recommendation import Candidate, Recommendation


def headline(digest: Digest) -> str:
    """The answer in a few words, for the list of runs."""
    if not digest.ok:
        return "no trial succeeded" if digest.trials else "no trial yet"
    if digest.policy is not None:
        return digest.policy.verdict(digest.labels[0])
    if digest.by_regime:
        return f"an action for each of {number(len(digest.best.by_regime))} regimes"
    if len(digest.best.front) == 1:
        best = digest.best.front[0]
        return f"{measured(best.reward, digest.labels[0])} ({evidence(best.interval, best.count)})"
    return f"{number(len(digest.best.front))} actions, none better in all objectives" if digest.best.front else "–"


def evidence(interval: tuple[float, float] | None, count: int) -> str:
    """How sure a number is: its 95 % interval and how often it was measured."""
    if interval is None:
        return "measured once" if count == 1 else counted(count, "measurement")
    return f"{number(interval[0])} to {number(interval[1])}, {counted(count, 'measurement')}"


def title(candidate: Candidate) -> str:
    """What a candidate may be called."""
    return "recommended" if candidate.confirmed and candidate.interval is not None else "best"


def notes(best: Recommendation, label: str) -> list[str]:
    """What a user should know before deploying the answer, as sentences."""
    lines = []
    if best.gain is not None and best.baseline is not None:
        lines.append(
            f"Against the baseline ({measured(best.baseline.reward, label)}): {describe_difference(best.gain, label)}."
        )
    elif best.is_confirmed and best.baseline is not None and best.front[0] is best.baseline:
        lines.append("The baseline is still the best: no finalist was better in fresh measurements.")
    if best.luckiest is not None and best.luckiest.shortfall:
        lucky = best.luckiest
        share = f" ({percent(abs(lucky.shortfall / lucky.reward))})" if lucky.reward else ""
        verb = "disappointed by" if lucky.shortfall > 0 else "been exceeded by"
        lines.append(
            f"The luckiest trial, {number(lucky.trial)}, gave {measured(lucky.reward, label)}; its configuration gave "
            f"{measured(lucky.confirmed.mean, label)} when measured again, so it would have {verb} "
            f"{measured(abs(lucky.shortfall), label)}{share}."
        )
    if best.drift is not None:
        lines.append(
            f"The machine drifted: the baseline changed by {measured(best.drift.change, label)} "
            f"({percent(best.drift.share)}) during the run, in {counted(len(best.drift.trials), 'measurement')}."
        )
    return lines


def describe_difference(gain: Estimate, label: str) -> str:
    """A difference with its sign and interval, and whether it may be chance."""
    sign = "+" if gain.mean >= 0 else ""
    text = f"{sign}{measured(gain.mean, label)} ({evidence(gain.interval, gain.count)})"
    if gain.interval is not None and gain.interval[0] <= 0 <= gain.interval[1]:
        text += ", which may be chance"
    return text


def gain(first: float, best: float, label: str = "") -> str:
    """How much better: a factor or a percentage where these make sense, otherwise the difference."""
    if first > 0 and best >= 2 * first:
        return f"{best / first:.3g} ×"
    if first * best > 0:
        return f"+{100 * (best - first) / abs(first):.3g} %"
    return f"+{measured(best - first, label)}"
