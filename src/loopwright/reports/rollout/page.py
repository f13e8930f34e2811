"""The page of a rollout run: how its rollouts were judged, what went wrong and who caused it."""

from collections.abc import Mapping, Sequence
from math import ceil, floor, fsum, log10
from typing import Any

from loopwright.ledger.ledger import Ledger
from loopwright.reports.formatting import duration, number, short
from loopwright.reports.rollout.digest import WINDOW, RolloutDigest
from loopwright.reports.rollout.samples import samples, task_samples
from loopwright.reports.rollout.tokens import LEVELS, tokenizer_of
from loopwright.reports.search.charts import COLOURED, floor_of, ticks

_BINS = 30
_BUCKETS = 240
_BLAME = {
    "policy": ("the policy itself", "scored, trained on, in the baseline"),
    "workload": ("the agent loop, a tool or its deadline", "tried once more; then no reward, not in the baseline"),
    "infra": ("a worker, an engine or a machine", "tried once more elsewhere; then no reward, not in the baseline"),
    "judge": ("the judger gave no verdict", "no reward, never a zero, not in the baseline"),
    "system": ("the run was stopped", "attempted again on resume"),
}
_GROUP_STATUSES = {
    "open": "in production",
    "ready": "waiting to be taken",
    "taken": "taken for a step whose checkpoint is not written yet",
    "trained": "used: trained on, or collected",
    "expired": "too old; the prompt is attempted again in another group",
    "filtered": "left out by a filter, for example because all rewards are equal",
    "short": "left out: fewer judged rollouts than `min_group`",
    "failed": "no usable rollout",
}
_PHASES = {
    "queue": "waiting for a free slot",
    "generate": "waiting for the engine",
    "tools": "running tools",
    "other": "the rest of the agent loop",
    "judge": "waiting for the verdict",
}


def headline(digest: RolloutDigest) -> str:
    """The answer in a few words, for the list of runs."""
    mean = digest.rollouts.total.mean
    return "no reward yet" if mean is None else f"mean reward {number(mean, 3)}"


def view(digest: RolloutDigest, chart: dict[str, Any]) -> dict[str, Any]:
    """The values of `templates/rollout.html`."""
    with Ledger.read(digest.folder / "ledger.db") as ledger:
        tokenizer = tokenizer_of(digest.part("engine"), digest.folder)
        episodes = samples(ledger, tokenizer)
        task_episodes = task_samples(ledger, tokenizer, digest.rollouts.hardest_trials)
    # The first rollouts beside the last: the rewards of a policy that is not trained should not drift.
    rewards = digest.rollouts.rewards
    count = min(WINDOW, len(rewards) // 2)
    return {
        **tables(),
        "task_episodes": task_episodes,
        "answer_rows": _answer_rows(digest) if digest.rollouts.total.count else [],
        "summary": _summary(digest),
        "marks": _marks(digest, chart),
        "trend": {"count": count, "first": fsum(rewards[:count]) / count, "last": fsum(rewards[-count:]) / count}
        if count > 1
        else None,
        "samples": episodes,
    }


def tables() -> dict[str, Any]:
    """The words of `templates/rollout_parts.html`."""
    return {"blame": _BLAME, "group_statuses": _GROUP_STATUSES, "phases": _PHASES, "levels": LEVELS}


def _answer_rows(digest: RolloutDigest) -> list[tuple[str, str]]:
    total = digest.rollouts.total
    return [
        *((f"of which {name}", number(total.part_means[name], 3)) for name in total.part_names),
        ("prompts, each a group", number(digest.groups.count)),
        ("sampled tokens", f"{number(total.tokens)}, {number(total.tokens / total.count, 3)} per rollout"),
        ("turns per rollout", number(total.turns / total.count, 3)),
        ("without a reward", f"{number(digest.unscored)} of {number(total.ended)}" if digest.unscored else "0"),
    ]


def _summary(digest: RolloutDigest) -> list[tuple[str, str]]:
    rows = [
        ("done", digest.progress),
        ("scored", number(digest.succeeded)),
        ("without a reward", number(digest.unscored)),
    ]
    if digest.unfinished:
        rows.append(("in flight or aborted", number(digest.unfinished)))
    if digest.wall_s:
        total = digest.rollouts.total
        rows.append(("wall time", duration(digest.wall_s)))
        rows.append(("rollouts per second", number(total.ended / digest.wall_s, 3)))
        rows.append(("tokens per second", number(round(total.tokens / digest.wall_s))))
    return rows


# -- charts ---------------------------------------------------------------------------------------------------------


def _marks(digest: RolloutDigest, chart: Mapping[str, Any]) -> list[tuple[str, str]]:
    mean = f"mean of the {WINDOW} rollouts up to it"
    marks = [("dot", "rollout"), ("stroke", mean)]
    if 1 < len(digest.rollouts.sources) <= COLOURED:
        marks = [(f"dot c{place}", name) for place, name in enumerate(chart["regimes"])] + [("stroke inked", mean)]
    if chart["floors"][0] is not None:
        marks.append(("low", "below the axis"))
    if chart["failed"]:
        marks.append(("tick", "without a reward"))
    return marks


def chart_data(digest: RolloutDigest) -> dict[str, Any]:
    """The drawn rollouts as columns, in the same shape as the trials of a search; groups; distributions."""
    statistics = digest.rollouts
    points = statistics.points
    few = 1 < len(statistics.sources) <= COLOURED
    rewards = [point.reward for point in points]
    distributions = {"reward": statistics.rewards, "tokens": statistics.tokens, "turns": statistics.turns}
    failed = ((n, outcome, reason) for n, outcome, fault, reason in digest.failed_trials if fault != "policy")
    return {
        "live": True,
        "noun": "trial",
        "labels": digest.labels,
        "last": max((point.number for point in points), default=0),
        "number": [point.number for point in points],
        "titles": [f"Trial {number(p.number)}, group {number(p.group)}: {short(p.task, 60)}" for p in points],
        "rewards": [rewards],
        "regime": [point.source if few else None for point in points],
        "regime_name": "source",
        "cached": [0] * len(points),
        "answer": [],
        "sketch": [],
        "floors": [floor_of(rewards)],
        "lines": [[{"regime": None, "steps": [(point.number, point.mean) for point in points]}]],
        "regimes": [short(name, 60) for name in statistics.sources] if few else [],
        "regime_means": [],
        "parameters": [],
        "failed": ticks(failed),
        "groups": _buckets(digest.groups.rows),
        "histograms": [{"name": name, **histogram(values)} for name, values in distributions.items() if values],
    }


def _buckets(rows: Sequence[tuple[int, float, float, float]]) -> list[list[float]]:
    """First and last group, mean, worst and best of each bucket; several groups share one if there are many."""
    size = max(1, ceil(len(rows) / _BUCKETS))
    buckets = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [
        [bucket[0][0], bucket[-1][0], *(fsum(row[column] for row in bucket) / len(bucket) for column in (1, 2, 3))]
        for bucket in buckets
    ]


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
