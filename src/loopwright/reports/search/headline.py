"""The answer of a search in a few words, how sure it is, and how much better it is than the start."""

from collections.abc import Sequence

from loopwright.reports.formatting import counted, measured, number, pairs, percent
from loopwright.reports.objective import Objective
from loopwright.reports.search.digest import Digest
from loopwright.selection.estimate import Estimate
from loopwright.selection.recommendation import Candidate, Recommendation


def headline(digest: Digest) -> str:
    """The answer in a few words, for the list of runs."""
    if not digest.ok:
        return "no trial succeeded" if digest.trials else "no trial yet"
    if digest.policy is not None:
        return digest.policy.verdict(digest.objectives[0])
    if digest.by_regime:
        return f"an action for each of {number(len(digest.best.by_regime))} regimes"
    if len(digest.best.front) == 1:
        return reward_text(digest.best.front[0], digest.objectives[0])
    return f"{number(len(digest.best.front))} actions, none better in all objectives" if digest.best.front else "–"


def reward_text(candidate: Candidate, objective: Objective) -> str:
    """The first objective of a candidate, and how sure it is."""
    evidence = objective.evidence(candidate.intervals[0], len(candidate.trials))
    return f"{objective.text(candidate.objectives[0])} ({evidence})"


def title(candidate: Candidate) -> str:
    """What a candidate may be called."""
    return "recommended" if candidate.confirmed and candidate.intervals[0] is not None else "best"


def describe(candidate: Candidate, objectives: Sequence[Objective]) -> str:
    """The objectives of a candidate with their intervals, and its action, for a terminal."""
    values = [
        f"{own.name} = {own.text(value)} ({own.evidence(interval, len(candidate.trials))})"
        for own, value, interval in zip(objectives, candidate.objectives, candidate.intervals, strict=True)
    ]
    return "   ".join([*values, f"with  {pairs(candidate.action)}"])


def notes(best: Recommendation, objective: Objective) -> list[str]:
    """What a user should know before deploying the answer, as sentences."""
    lines = []
    if best.gain is not None and best.baseline is not None:
        difference = describe_difference(best.gain, objective, "paired measurement")
        lines.append(f"Against the baseline ({objective.text(best.baseline.objectives[0])}): {difference}.")
    elif best.baseline is not None and best.front and best.front[0] is best.baseline:
        lines.append("The baseline is still the best: no finalist was better in fresh measurements.")
    if best.luckiest is not None and best.luckiest.shortfall:
        lucky = best.luckiest
        share = f" ({percent(abs(lucky.shortfall / lucky.reward))})" if lucky.reward else ""
        change = measured(abs(lucky.shortfall), objective.name) + share
        direction = "worse" if lucky.shortfall > 0 else "better"
        before, after = objective.text(lucky.reward), objective.text(lucky.confirmed.mean)
        lines.append(
            f"The luckiest trial, {number(lucky.trial)}, gave {before}. Measured again, its configuration gave "
            + ("the same." if before == after else f"{after}, which is {change} {direction}.")
        )
    if best.drift is not None:
        lines.append(
            f"The machine drifted: the baseline changed by {objective.text(best.drift.change)} "
            f"({percent(best.drift.share)}) during the run, in {counted(len(best.drift.trials), 'measurement')}."
        )
    return lines


def describe_difference(gain: Estimate, objective: Objective, noun: str = "measurement") -> str:
    """A difference with its sign and interval, and whether it may be chance."""
    sign = "+" if objective.value(gain.mean) >= 0 else ""
    text = f"{sign}{objective.text(gain.mean)} ({objective.evidence(gain.interval, gain.count, noun)})"
    if gain.interval is not None and gain.interval[0] <= 0 <= gain.interval[1]:
        text += ", which may be chance"
    return text


def gain(first: float, best: float, objective: Objective) -> str:
    """How much better than a first reward: a factor or a percentage where these make sense, else the difference."""
    before, after = objective.value(first), objective.value(best)
    change = after - before
    if before > 0 and after >= 2 * before:
        return f"{after / before:.3g} ×"
    if before * after > 0:
        return f"{100 * change / abs(before):+.3g} %".replace("-", "−")
    return f"{'+' if change > 0 else ''}{measured(change, objective.name)}"
