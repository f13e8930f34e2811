"""The page of a search: the answer first, then the evidence for it."""

from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from itertools import combinations
from math import fsum
from statistics import median, stdev
from typing import Any

from loopwright.core.outcome import Outcome
from loopwright.core.trial import Trial
from loopwright.reports.formatting import assignments, duration, measured, number, short, spread
from loopwright.reports.live.evaluations import curve_marks
from loopwright.reports.search.charts import COLOURED, DRAWN
from loopwright.reports.search.curves import curves_svg
from loopwright.reports.search.digest import Digest
from loopwright.reports.search.headline import gain, notes, reward_text
from loopwright.reports.search.insights import failure_rates, important
from loopwright.selection.recommendation import Candidate


def view(digest: Digest, chart: dict[str, Any]) -> dict[str, Any]:
    """The values of `templates/search.html`."""
    slowest, time_summary = _slowest(digest)
    return {
        "server": None,
        "summary": _summary(digest),
        "important": important(digest),
        "failure_rates": failure_rates(digest),
        "table_note": _table_note(chart["table"]),
        "marks": _marks(digest, chart),
        "not_drawn": _not_drawn(digest, chart),
        "objective_pairs": list(combinations(range(len(digest.labels)), 2))[:3],
        "curves": curves_svg(digest.folder, digest.about, digest.trials),
        "curve_marks": curve_marks(chart["curves"]),
        "slowest": slowest,
        "time_summary": time_summary,
        "varied": _varied(digest) if digest.ok else [],
        "answer_title": _answer_title,
        "gain": gain,
        "notes": notes(digest.best, digest.objectives[0]),
        "metric_rows": _metric_rows,
        "names_of": names_of,
        "parameter_rows": parameter_rows,
        "reward_range": reward_range,
        "reward_text": reward_text,
        "sorted_by_regime": sorted_by_regime,
        "varied_names": varied_names,
    }


def _summary(digest: Digest) -> list[tuple[str, str]]:
    succeeded, infeasible = digest.outcomes[Outcome.OK], digest.outcomes[Outcome.INFEASIBLE]
    stopped = digest.outcomes[Outcome.STOPPED]
    failed = number(digest.done - succeeded - stopped) + (f" ({number(infeasible)} infeasible)" if infeasible else "")
    rows = [("done", digest.progress), ("ok", number(succeeded)), ("failed", failed), ("cached", number(digest.cached))]
    if stopped:
        rows.append(("stopped early", number(stopped)))
    if digest.unfinished:
        rows.append(("in flight or aborted", number(digest.unfinished)))
    if digest.wall_s is not None:
        rows.append(("wall time", duration(digest.wall_s)))
    confirming = sum(bool(trial.phase) for trial in digest.trials)
    if confirming:
        rows.append(("measured again", number(confirming)))
    if digest.repeats > 1:
        rows.append(("repeats", number(digest.repeats)))
    if digest.about.get("parallel"):
        rows.append(("in parallel", number(digest.about["parallel"])))
    return rows


def _answer_title(digest: Digest, best: Candidate) -> str:
    label, regimes = digest.labels[0], number(len(digest.regimes))
    if best.confirmed and best.intervals[0] is not None:
        over = f"mean over {number(len(best.regimes))} of {regimes} regimes: " if len(best.regimes) > 1 else ""
        return f"Recommended, after {number(len(best.trials))} fresh measurements: {over}{label}"
    if len(best.regimes) > 1:
        return f"Best action over {number(len(best.regimes))} of {regimes} regimes: mean {label}"
    if len(digest.regimes) > 1:
        only = short(assignments(best.regimes[0]), 80)
        return f"Best {label}, measured only under {only}; {regimes} regimes were met"
    return f"Best {label}"


def reward_range(digest: Digest, best: Candidate) -> tuple[float, float]:
    """The lowest and the highest value of its single trials."""
    numbers, objective = set(best.trials), digest.objectives[0]
    rewards = [objective.value(trial.objectives[0]) for trial in digest.ok if trial.number in numbers]
    return min(rewards), max(rewards)


def parameter_rows(digest: Digest, best: Candidate) -> list[tuple[str, Any, bool]]:
    """Each parameter of an action with its value, and whether it was varied at all."""
    is_only = len(digest.ok) == 1
    rows = _in_scenario_order(digest, best.action)
    return [(name, value, digest.varied.get(name, True) or is_only) for name, value in rows]


def _metric_rows(digest: Digest, best: Candidate) -> list[tuple[str, str]]:
    """What was measured with an action, apart from the objective: the mean and the standard deviation."""
    metrics: dict[str, list[float]] = {}
    for trial in digest.whole(best.trials):
        for name, value in trial.metrics.items():
            if isinstance(value, (int, float)) and name != digest.labels[0]:
                metrics.setdefault(name, []).append(value)
    return [
        (name, spread(fsum(values) / len(values), stdev(values), name) if values[1:] else measured(values[0], name))
        for name, values in metrics.items()
    ]


def names_of(tables: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys of all tables, each once."""
    return list(dict.fromkeys(name for table in tables for name in table))


def sorted_by_regime(digest: Digest, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates in the order of their regimes."""
    return sorted(candidates, key=lambda candidate: digest.order(candidate.regimes[0]))


def varied_names(digest: Digest, candidates: Sequence[Candidate]) -> list[str]:
    """The parameters of these candidates that were varied, in the order of the scenario."""
    names = {name for candidate in candidates for name in candidate.action}
    return [name for name in _varied(digest) if name in names]


def _varied(digest: Digest) -> list[str]:
    return [name for name, is_varied in _in_scenario_order(digest, digest.varied) if is_varied]


def _in_scenario_order(digest: Digest, action: Mapping[str, Any]) -> list[tuple[str, Any]]:
    order = {name: place for place, name in enumerate(digest.table("parameters"))}
    return sorted(action.items(), key=lambda item: order.get(item[0], len(order)))


# -- charts ---------------------------------------------------------------------------------------------------------


def _marks(digest: Digest, chart: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the marks of the progress chart mean; only those that occur."""
    line = "best so far"
    if len(digest.regimes) > COLOURED:
        line = "best so far under any regime"
    elif digest.repeats > 1:
        line = "best mean over repeats so far"
    marks = [("dot", "trial"), ("stroke", line)]
    if 1 < len(digest.regimes) <= COLOURED:
        marks = [(f"dot c{place}", name) for place, name in enumerate(chart["regimes"])]
        marks.append(("stroke plain", "best mean so far, under that regime"))
    if any(chart["cached"]):
        marks.append(("ring", "from the cache"))
    if chart["answer"]:
        marks.append(("gem", "best configuration"))
    if any(floor is not None for floor in chart["floors"]):
        marks.append(("low", "beyond the axis"))
    if chart["failed"]:
        outcomes = {outcome for _, outcome, _ in chart["failed"]}
        words = [*(["failed"] if outcomes - {"stopped"} else []), *(["stopped early"] if "stopped" in outcomes else [])]
        marks.append(("tick", " or ".join(words)))
    return marks


def _not_drawn(digest: Digest, chart: Mapping[str, Any]) -> str:
    point_count, failed, notes = len(chart["number"]), digest.done - len(digest.ok), []
    if point_count < len(digest.ok):
        notes.append(
            f"{number(point_count)} of {number(len(digest.ok))} ok trials are drawn, because there are more than "
            f"{number(DRAWN)}: all that set a record, the best, and an even share of the rest. The line is exact."
        )
    if len(chart["failed"]) < failed:
        notes.append(f"{number(len(chart['failed']))} of {number(failed)} other trials have a tick.")
    return " ".join(notes)


def _table_note(table: Mapping[str, Any]) -> str:
    rows = len(table["columns"][0])
    if rows == table["count"]:
        return "Click a column to sort by it."
    return (
        f"{number(rows)} of {number(table['count'])} trials are listed: the best, and an even share of the rest. "
        "trajectory.csv has all of them. Click a column to sort by it."
    )


# -- time and memory ------------------------------------------------------------------------------------------------


def _slowest(digest: Digest) -> tuple[list[Trial], str]:
    """The three slowest trials, and a sentence about the time of all; nothing if fewer than two were timed."""
    timed = [trial for trial in digest.trials if trial.cached_from is None and trial.wall_s is not None]
    if len(timed) < 2:
        return [], ""
    times = [trial.wall_s or 0.0 for trial in timed]
    slowest = nlargest(3, timed, key=lambda trial: trial.wall_s or 0.0)
    return digest.whole(trial.number for trial in slowest), (
        f"The median trial took {duration(median(times))}, the slowest {duration(max(times))}; together they used "
        f"{duration(fsum(trial.cpu_s for trial in timed))} of processor time."
    )
