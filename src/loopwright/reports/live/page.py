"""The page of a live run: the returns of its episodes, and how they grew."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from loopwright.reports.formatting import assignments, counted, duration, number, short
from loopwright.reports.live.digest import WINDOW, LiveDigest
from loopwright.reports.live.evaluations import curve_marks
from loopwright.reports.search.charts import COLOURED, floor_of, ticks


def headline(digest: LiveDigest) -> str:
    """The answer in a few words, for the list of runs."""
    episodes = digest.episodes
    if digest.evaluations.results:
        return digest.evaluations.verdict()
    if not episodes.total.count:
        return "every episode ended with a failed step" if episodes.failed else "no episode has reached its end yet"
    latest = f"the last {number(episodes.window)} of {number(episodes.total.count)} episodes"
    return f"mean return {number(episodes.after)} in {latest}"


def view(digest: LiveDigest, chart: dict[str, Any]) -> dict[str, Any]:
    """The values of `templates/live.html`."""
    workload = digest.table("workload")
    return {
        "server": workload.get("env_class") or workload.get("address") or "an object of the calling program",
        "answer_rows": _answer_rows(digest) if digest.episodes.total.count else [],
        "summary": _summary(digest),
        "marks": _marks(digest, chart),
        "evaluated": digest.evaluations,
        "curve_marks": curve_marks(chart["curves"]),
    }


def _answer_rows(digest: LiveDigest) -> list[tuple[str, str]]:
    episodes = digest.episodes
    rows = [
        ("episodes", number(episodes.total.count)),
        ("steps", number(digest.steps)),
        ("best return", f"{number(episodes.total.best)} (steps {_range(*episodes.record)})"),
        (f"mean length of the last {number(episodes.window)}", f"{number(episodes.latest_length)} steps"),
    ]
    if episodes.truncated:
        rows.append(("truncated", counted(episodes.truncated, "episode")))
    if episodes.cut:
        rows.append(("cut short", f"{counted(episodes.cut, 'episode')}, in no mean"))
    if episodes.failed:
        rows.append(("ended by a failed step", f"{counted(episodes.failed, 'episode')}, in no mean"))
    return rows


def _summary(digest: LiveDigest) -> list[tuple[str, str]]:
    failed = number(digest.done - digest.succeeded)
    rows = [("done", digest.progress), ("ok", number(digest.succeeded)), ("failed", failed)]
    if digest.unfinished:
        rows.append(("in flight or aborted", number(digest.unfinished)))
    if digest.wall_s is not None:
        rows.append(("wall time", duration(digest.wall_s)))
        if digest.wall_s:
            rows.append(("steps/s", number(digest.steps / digest.wall_s)))
    return rows


def _marks(digest: LiveDigest, chart: Mapping[str, Any]) -> list[tuple[str, str]]:
    smoothing = digest.episodes.smoothing
    mean = f"mean of the {smoothing} episodes up to it" if smoothing > 1 else "each episode"
    marks = [("dot", "episode"), ("stroke", mean)]
    if 1 < len(digest.regimes) <= COLOURED:
        marks = [(f"dot c{place}", name) for place, name in enumerate(chart["regimes"])] + [("stroke inked", mean)]
    if any(floor is not None for floor in chart["floors"]):
        marks.append(("low", "below the axis"))
    if chart["failed"]:
        marks.append(("tick", "failed step"))
    return marks


def chart_data(digest: LiveDigest) -> dict[str, Any]:
    """The drawn episodes as columns, in the same shape as the trials of a search."""
    points = digest.episodes.points
    # Recorded in the order of their first episode, shown in the order of their values.
    order = [digest.regimes.index(regime) for regime, _ in digest.episodes.regimes.values()]
    rewards: list[list[float]] = [[episode.reward for episode in points], [episode.length for episode in points]]
    seed_trials = digest.episodes.seed_trials or digest.steps + 1
    by_seed = [list(group) for _, group in groupby(points, key=lambda episode: (episode.last - 1) // seed_trials)]
    means = [
        [[(e.last, e.mean_reward) for e in own if e.mean_reward is not None] for own in by_seed],
        [[(e.last, e.mean_length) for e in own if e.mean_length is not None] for own in by_seed],
    ]
    few = len(order) <= WINDOW
    return {
        "live": True,
        "labels": digest.labels,
        "last": digest.steps,
        "number": [episode.last for episode in points],
        "titles": [f"Episode {number(e.number)}, steps {_range(e.first, e.last)}" for e in points],
        "rewards": rewards,
        "regime": [None if e.regime is None or not few else order[e.regime] for e in points],
        "cached": [0] * len(points),
        "answer": [],
        "sketch": [],
        "floors": [floor_of(rewards[0]), None],
        "lines": [[{"regime": None, "steps": steps} for steps in lines] for lines in means],
        "regimes": [short(assignments(regime), 60) for regime in digest.regimes] if few else [],
        "regime_means": [],
        "parameters": [],
        "curves": digest.evaluations.curves(),
        "steps": digest.evaluations.trials or digest.steps,
        "skipped": [],
        "failed": ticks((n, outcome, reason) for n, outcome, _, reason in digest.failed_trials),
    }


def _range(first: int, last: int) -> str:
    return f"{number(first)}–{number(last)}" if last > first else number(first)
