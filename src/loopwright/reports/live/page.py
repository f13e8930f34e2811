"""A live run's part of the report: what its episodes came to, and how that grew."""

from typing import Any

from loopwright.reports.live.digest import WINDOW, LiveDigest, Tally
from loopwright.reports.markup import Html, assignments, exact, html, join, number, short, table
from loopwright.reports.search.charts import COLOURED, floor_of, ticks

_ROWS = 24


def live_answer(digest: LiveDigest) -> Html:
    """What the last episodes came to, beside the first ones."""
    found = digest.episodes
    if not found.total.count:
        if found.failed:
            said = f"No episode has a return: all {number(found.failed)} were ended by a failed step."
            return html("<p class='note bad'>{}</p>", said)
        said = "No episode has ended yet." if digest.steps else "No step has been taken yet."
        return html("<p class='note'>{}</p>", said)
    many = found.window
    what = f"Mean return of the last {number(many)} episodes" if many > 1 else "Return of the last episode"
    left = html(
        "<div><div class='what'>{}</div><div class='value'>{}</div>{}</div>", what, number(found.after), _gain(digest)
    )
    rows: list[list[object]] = [
        ["episodes", number(found.total.count)],
        ["steps", number(digest.steps)],
        ["best return", f"{number(found.total.best)} (trials {_span(*found.record)})"],
        [f"mean length of the last {number(many)}", f"{number(found.latest_length)} steps"],
    ]
    if found.truncated:
        rows.append(["cut short", _episodes(found.truncated)])
    if found.failed:
        rows.append(["ended by a failed step", f"{_episodes(found.failed)}, in no mean"])
    return html("<div class='answer'>{}<div>{}</div></div>", left, table(["", ""], rows, "wide facts"))


def live_headline(digest: LiveDigest) -> str:
    """The answer in a few words, for the list of runs."""
    found = digest.episodes
    if not found.total.count:
        return "every episode was ended by a failed step" if found.failed else "no episode has ended yet"
    return (
        f"mean return {number(found.after)} in the last {number(found.window)} of {number(found.total.count)} episodes"
    )


def _gain(digest: LiveDigest) -> Html:
    found = digest.episodes
    if found.total.count < 2:
        return html("<p class='muted'>One episode so far: there is nothing to compare it with.</p>")
    first = f"the first {number(found.window)}" if found.window > 1 else "the first"
    rise = found.after - found.before
    if rise == 0:
        return html("<p class='muted'>as {} ({})</p>", first, number(found.before))
    css, sign, word = ("gain", "+", "against") if rise > 0 else ("muted", "", "worse than")
    return html(
        "<p><span class='{}'>{}{}</span> {} {} ({})</p>", css, sign, number(rise), word, first, number(found.before)
    )


def live_regimes(digest: LiveDigest) -> Html:
    """The returns under each regime."""
    if len(digest.regimes) < 2:
        return Html("")
    drawn = list(digest.regimes[0])
    rows = [
        [
            *(html("<span class='mono'>{}</span>", short(exact(regime.get(name)), 80)) for name in drawn),
            *_told(digest.tally(regime)),
        ]
        for regime in digest.regimes[:_ROWS]
    ]
    rest = len(digest.regimes) - _ROWS
    more = html("<p class='muted'>And {} more regimes.</p>", number(rest)) if rest > 0 else Html("")
    head = [*drawn, "episodes", f"mean return of its last {WINDOW}", "worst", "best", "mean length"]
    return html("<h3>Returns by regime</h3>{}{}", table(head, rows, "wide"), more)


def _told(tally: Tally) -> list[str]:
    values = (tally.count, tally.mean, tally.worst, tally.best, tally.length / tally.count)
    return [number(value) for value in values]


def live_notes(digest: LiveDigest, chart: dict[str, Any]) -> Html:
    """What the marks mean, and how many there are."""
    marks = [("dot", "episode"), ("stroke", f"mean of the {WINDOW} episodes up to it")]
    if 1 < len(digest.regimes) <= COLOURED:
        marks = [
            *((f"dot c{place}", name) for place, name in enumerate(chart["regimes"])),
            ("stroke inked", marks[1][1]),
        ]
    if any(floor is not None for floor in chart["floors"]):
        marks.append(("low", "below the axis"))
    if chart["failed"]:
        marks.append(("tick", "failed step"))
    key = join(html("<span><i class='{}'></i>{}</span>", mark, text) for mark, text in marks)
    return html("<div class='key'>{}</div>", key)


def live_thinned(digest: LiveDigest, chart: dict[str, Any]) -> Html:
    """A word on what is not drawn."""
    drawn, every = len(chart["number"]), digest.episodes.total.count
    if drawn == every:
        return Html("")
    return html(
        "<p><small>{} of {} episodes are drawn, evenly spread; the means are over all of them.</small></p>",
        number(drawn),
        number(every),
    )


def live_chart(digest: LiveDigest) -> dict[str, Any]:
    """The drawn episodes as columns, in the shape in which the script knows trials."""
    drawn = digest.episodes.drawn
    # Found in the order of their first meeting, shown in the order of their values.
    order = [digest.regimes.index(regime) for regime, _ in digest.episodes.regimes.values()]
    rewards: list[list[float]] = [[episode.reward for episode in drawn], [episode.length for episode in drawn]]
    means = [[(e.last, e.mean_reward) for e in drawn], [(e.last, e.mean_length) for e in drawn]]
    few = len(order) <= WINDOW
    return {
        "live": True,
        "labels": digest.labels,
        "last": digest.steps,
        "number": [episode.last for episode in drawn],
        "titles": [f"Episode {number(e.number)}, trials {_span(e.first, e.last)}" for e in drawn],
        "rewards": rewards,
        "regime": [None if e.regime is None or not few else order[e.regime] for e in drawn],
        "cached": [0] * len(drawn),
        "answer": [],
        "sketch": [],
        "floors": [floor_of(rewards[0]), None],
        "lines": [[{"regime": None, "steps": steps}] for steps in means],
        "regimes": [short(assignments(regime), 60) for regime in digest.regimes] if few else [],
        "regime_means": [],
        "parameters": [],
        "failed": ticks((n, outcome, reason) for n, outcome, _, reason in digest.bad),
    }


def _span(first: int, last: int) -> str:
    return f"{number(first)}–{number(last)}" if last > first else number(first)


def _episodes(count: int) -> str:
    return "1 episode" if count == 1 else f"{number(count)} episodes"
