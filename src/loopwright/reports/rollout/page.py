"""A rollout run's part of the report: how its rollouts were judged, what went wrong and whose doing it was."""

from collections.abc import Sequence
from math import ceil, floor, fsum, log10
from typing import Any

from loopwright.reports.links import trial_links
from loopwright.reports.markup import Html, duration, html, join, number, short, table
from loopwright.reports.rollout.digest import PHASES, WINDOW, RolloutDigest, Tally, quantile
from loopwright.reports.search.charts import COLOURED, floor_of, ticks

_ROWS = 8
_BINS = 30
_BUCKETS = 240
_BLAME = {
    "policy": ("the policy did it itself", "scored, trained on, in the baseline"),
    "workload": ("the agent loop, a tool or its deadline", "tried once more; then no reward, in no baseline"),
    "infra": ("a worker, an engine or a machine", "tried once more elsewhere; then no reward, in no baseline"),
    "judge": ("the judger gave no verdict", "no reward, never a zero, in no baseline"),
    "system": ("whoever stopped the run", "attempted again on resume"),
}
_STATUSES = {
    "open": "in production",
    "ready": "waiting to be taken",
    "taken": "taken for a step whose checkpoint is not safe yet",
    "trained": "used",
    "expired": "too old; the prompt is rolled again in another group",
    "filtered": "left out by a filter, such as all rewards equal",
    "failed": "not enough rollouts of it could be had",
}
_SPENT = {
    "queue": "waiting for a free place",
    "generate": "waiting for the engine",
    "tools": "running tools",
    "other": "the rest of the agent loop",
    "judge": "waiting for the verdict",
}


def rollout_answer(digest: RolloutDigest) -> Html:
    """The mean reward and what it is made of."""
    total = digest.rolled.total
    if total.mean is None:
        said = "No rollout has a reward." if total.ended else "No rollout has ended yet."
        return html("<p class='note {}'>{}</p>", "bad" if total.ended else "", said)
    left = html(
        "<div><div class='what'>Mean reward of {} rollouts</div><div class='value'>{} <small>{}</small></div>{}</div>",
        number(total.count),
        number(total.mean, 3),
        "" if total.spread is None else f"± {number(total.spread, 2)}",
        _trend(digest),
    )
    rows: list[list[object]] = [[f"of which {name}", number(value, 3)] for name, value in _parts(total)]
    lost = f"{number(digest.unscored)} of {number(total.ended)}" if digest.unscored else "0"
    rows += [
        ["prompts, each a group", number(digest.groups.count)],
        ["sampled tokens", f"{number(total.tokens)}, {number(total.tokens / total.count, 3)} per rollout"],
        ["turns per rollout", number(total.turns / total.count, 3)],
        ["without a reward", lost],
    ]
    return html("<div class='answer'>{}<div>{}</div></div>", left, table(["", ""], rows, "wide facts"))


def rollout_headline(digest: RolloutDigest) -> str:
    """The answer in a few words, for the list of runs."""
    total = digest.rolled.total
    return "no reward yet" if total.mean is None else f"mean reward {number(total.mean, 3)}"


def _parts(tally: Tally) -> list[tuple[str, float]]:
    return list(tally.part_means.items()) if len(tally.parts) > 1 else []


def _trend(digest: RolloutDigest) -> Html:
    """The first rollouts beside the last: a policy that is not trained should not drift."""
    rewards = digest.rolled.rewards
    many = min(WINDOW, len(rewards) // 2)
    if many < 2:
        return Html("")
    first, last = fsum(rewards[:many]) / many, fsum(rewards[-many:]) / many
    text = f"{number(last, 3)} in the last {number(many)}, {number(first, 3)} in the first {number(many)}"
    return html("<p class='muted'>{}</p>", text)


def rollout_facts(digest: RolloutDigest) -> Html:
    """How much was done."""
    facts = {
        "done": f"{number(digest.done)} of {number(digest.budget)}" if digest.budget else number(digest.done),
        "scored": number(digest.succeeded),
        "without a reward": number(digest.unscored),
    }
    if digest.unfinished:
        facts["in flight or aborted"] = number(digest.unfinished)
    if digest.wall_s:
        facts["wall time"] = duration(digest.wall_s)
        facts["rollouts per second"] = number(digest.rolled.total.ended / digest.wall_s, 3)
        facts["tokens per second"] = number(round(digest.rolled.total.tokens / digest.wall_s))
    listed = join(html("<div><dt>{}</dt><dd>{}</dd></div>", name, value) for name, value in facts.items())
    return html("<dl class='facts'>{}</dl>", listed) if digest.count else Html("")


# -- charts ---------------------------------------------------------------------------------------------------------


def rollout_key(digest: RolloutDigest, chart: dict[str, Any]) -> Html:
    """What the marks of the rewards mean."""
    mean = f"mean of the {WINDOW} rollouts up to it"
    marks = [("dot", "rollout"), ("stroke", mean)]
    if 1 < len(digest.rolled.sources) <= COLOURED:
        marks = [(f"dot c{place}", name) for place, name in enumerate(chart["regimes"])] + [("stroke inked", mean)]
    if chart["floors"][0] is not None:
        marks.append(("low", "below the axis"))
    if chart["failed"]:
        marks.append(("tick", "without a reward"))
    return html(
        "<div class='key'>{}</div>",
        join(html("<span><i class='{}'></i>{}</span>", mark, text) for mark, text in marks),
    )


def rollout_thinned(digest: RolloutDigest, chart: dict[str, Any]) -> Html:
    """A word on what is not drawn."""
    drawn, every = len(chart["number"]), digest.rolled.total.count
    if drawn == every:
        return Html("")
    text = "<p><small>{} of {} rollouts are drawn, evenly spread; the means are over all of them.</small></p>"
    return html(text, number(drawn), number(every))


def rollout_chart(digest: RolloutDigest) -> dict[str, Any]:
    """The drawn rollouts as columns, in the shape in which the script knows trials; groups; distributions."""
    rolled = digest.rolled
    drawn = rolled.drawn
    few = 1 < len(rolled.sources) <= COLOURED
    rewards = [point.reward for point in drawn]
    return {
        "live": True,
        "labels": digest.labels,
        "last": max((point.number for point in drawn), default=0),
        "number": [point.number for point in drawn],
        "titles": [f"Trial {number(p.number)}, group {number(p.group)}: {short(p.task, 60)}" for p in drawn],
        "rewards": [rewards],
        "regime": [point.source if few else None for point in drawn],
        "regime_name": "source",
        "cached": [0] * len(drawn),
        "answer": [],
        "sketch": [],
        "floors": [floor_of(rewards)],
        "lines": [[{"regime": None, "steps": [(point.number, point.mean) for point in drawn]}]],
        "regimes": [short(name, 60) for name in rolled.sources] if few else [],
        "regime_means": [],
        "parameters": [],
        "failed": ticks((n, outcome, reason) for n, outcome, fault, reason in digest.bad if fault != "policy"),
        "groups": _bucketed(digest.groups.rows),
        "histograms": [
            {"name": name, **histogram(values)}
            for name, values in (("reward", rolled.rewards), ("tokens", rolled.tokens), ("turns", rolled.turns))
            if values
        ],
    }


def _bucketed(rows: Sequence[tuple[int, float, float, float]]) -> list[list[float]]:
    """First and last group, mean, worst and best of each; several groups together where there are many."""
    size = max(1, ceil(len(rows) / _BUCKETS))
    found = []
    for start in range(0, len(rows), size):
        bucket = rows[start : start + size]
        means = [fsum(row[column] for row in bucket) / len(bucket) for column in (1, 2, 3)]
        found.append([bucket[0][0], bucket[-1][0], *means])
    return found


def histogram(values: Sequence[float]) -> dict[str, Any]:
    """Counts in bins of a round width; whole numbers have bins of whole numbers."""
    low, high = min(values), max(values)
    whole = all(value == int(value) for value in values)
    raw = (high - low) / _BINS if high > low else (1.0 if whole else abs(low) or 1.0)
    scale = 10.0 ** floor(log10(raw))
    width = next(step * scale for step in (1, 2, 5, 10) if step * scale >= raw * 0.999)
    width = max(1.0, width) if whole else width
    first = floor(low / width)
    counts = [0] * (floor(high / width) - first + 1)
    for value in values:
        counts[floor(value / width) - first] += 1
    ranges = [(round((first + i) * width, 10), round((first + i + 1) * width, 10)) for i in range(len(counts))]
    names = [number(a) if whole and width == 1 else f"{number(a)} … {number(b)}" for a, b in ranges]
    return {"from": [a for a, _ in ranges], "names": names, "counts": counts}


# -- tables ---------------------------------------------------------------------------------------------------------


def rollout_sources(digest: RolloutDigest) -> Html:
    """Rewards by source of tasks and by part."""
    total, sources = digest.rolled.total, digest.rolled.sources
    if not total.count:
        return Html("")
    parts = [name for name, _ in _parts(total)]
    named = [*sources.items(), *([("all", total)] if len(sources) > 1 else [])]
    rows = [
        [
            short(name, 60),
            number(tally.ended),
            html("<span class='number'>{}</span>", _mean(tally)),
            *(number(tally.part_means[part], 3) if part in tally.parts else "–" for part in parts),
            number(tally.tokens / tally.count, 3) if tally.count else "–",
            number(tally.turns / tally.count, 3) if tally.count else "–",
            number(tally.ended - tally.count),
        ]
        for name, tally in named
    ]
    head = ["task source", "rollouts", "mean reward", *parts, "tokens", "turns", "without a reward"]
    return html("<h3>Rewards by task source</h3>{}", table(head, rows, "wide"))


def _mean(tally: Tally) -> str:
    if tally.mean is None:
        return "–"
    return number(tally.mean, 3) + ("" if tally.spread is None else f" ± {number(tally.spread, 2)}")


def rollout_faults(digest: RolloutDigest) -> Html:
    """How rollouts ended, how often each fault came, and what a fault means for training."""
    ended = digest.rolled.total.ended
    if not ended:
        return Html("")
    outcomes = [(name, count) for name, count in digest.outcomes.most_common() if name not in ("running", "aborted")]
    said = ", ".join(f"{number(count)} {name} ({_share(count, ended)})" for name, count in outcomes)
    parts = [html("<h3>Outcomes and faults</h3><p class='muted'>{}</p>", said)]
    reasons: dict[str, list[Html]] = {}
    for failure in digest.failures():
        shown = [
            html("<li><b>{}</b> {} <span class='muted'>{}</span></li>", failure.outcome, short(reason, 160), links)
            for reason, trials in failure.reasons[:2]
            for links in [trial_links(digest.folder, trials)]
        ]
        reasons.setdefault(failure.fault, []).extend(shown)
    rows = []
    for fault, count in digest.rolled.faults.most_common():
        who, then = _BLAME.get(fault, ("unknown", "–"))
        rate = html("<span class='number'>{}</span>", _share(count, ended))
        cells = [html("<b>{}</b>", fault), number(count), rate, _wrapped(who), _wrapped(then)]
        rows.append([*cells, html("<ul>{}</ul>", join(reasons.get(fault, [])))])
    parts.append(_again(digest))
    if rows:
        parts.append(table(["fault", "rollouts", "rate", "who is to blame", "so it is", "outcomes"], rows, "wide"))
    else:
        parts.append(html("<p class='muted'>No fault.</p>"))
    return join(parts)


def _again(digest: RolloutDigest) -> Html:
    retried = digest.retried
    if not retried.first:
        return Html("")
    many = sum(retried.first.values())
    why = ", ".join(f"{number(count)} {outcome}" for outcome, count in retried.first.items())
    of = "" if retried.looked_at >= digest.rolled.total.ended else f" of the latest {number(retried.looked_at)}"
    text = f"{number(many)} rollouts{of} took a second attempt (the first was {why}); {number(retried.came_right)} "
    return html("<p class='muted'>{}</p>", f"{text}of them came right.")


def _wrapped(text: str) -> Html:
    return html("<div class='words'>{}</div>", text)


def _share(count: int, of: int) -> str:
    return f"{number(100 * count / of, 3)} %"


def rollout_groups(digest: RolloutDigest) -> Html:
    """What became of the groups."""
    groups = digest.groups
    if not groups.statuses:
        return Html("")
    rows = [
        [html("<b>{}</b>", status), number(groups.statuses[status]), told]
        for status, told in _STATUSES.items()
        if status in groups.statuses
    ]
    level = ""
    if groups.several:
        share = f"{number(groups.level)} of {number(groups.several)} ({_share(groups.level, groups.several)})"
        level = (
            f"Groups in which all rollouts got the same reward: {share}. "
            "Against their own mean there is nothing to learn from these."
        )
    return html("<h3>Groups</h3>{}<p class='muted'>{}</p>", table(["status", "groups", ""], rows), level)


def rollout_phases(digest: RolloutDigest) -> Html:
    """Where the time went."""
    spent = {name: digest.rolled.phases[name] for name in PHASES if digest.rolled.phases.get(name)}
    whole = fsum(fsum(values) for values in spent.values())
    if not whole:
        return Html("")
    rows = [
        [
            html("<b>{}</b>", name),
            *(_time(value) for value in (quantile(values, 0.5), quantile(values, 0.95), max(values), fsum(values))),
            _bar(fsum(values) / whole),
            html("<span class='number muted'>{}</span>", _SPENT[name]),
        ]
        for name, values in spent.items()
    ]
    head = ["phase", "median", "95 %", "longest", "together", "share", ""]
    return html("<h3>Time per phase</h3>{}", table(head, rows, "wide"))


def _bar(share: float) -> Html:
    width, told = f"{100 * share:.1f}", f"{number(100 * share, 3)} %"
    return html("<div class='share'><i style='width:{}%'></i><span>{}</span></div>", width, told)


def _time(seconds: float) -> Html:
    return html("<span class='number'>{}</span>", duration(seconds))


def rollout_tasks(digest: RolloutDigest) -> Html:
    """The tasks with the lowest and the highest mean rewards."""
    scored = [(task, tally) for task, tally in digest.rolled.tasks.items() if tally.mean is not None]
    if len(scored) < 2:
        return Html("")
    scored.sort(key=lambda item: (item[1].mean or 0.0, item[0]))
    some = min(_ROWS, len(scored) // 2)
    columns = [("Hardest tasks", scored[:some]), ("Easiest tasks", scored[::-1][:some])]
    shown = [html("<div><h3>{}</h3>{}</div>", title, _task_table(found)) for title, found in columns]
    return html("<div class='pair'>{}</div>", join(shown))


def _task_table(found: Sequence[tuple[tuple[str, str], Tally]]) -> Html:
    rows = [
        [
            html("<span class='long'>{}</span>", short(task, 60)),
            number(tally.mean, 3),
            number(tally.count),
            number(tally.tokens / tally.count, 3),
        ]
        for (_, task), tally in found
    ]
    return table(["task", "mean reward", "rollouts", "tokens"], rows, "wide")
