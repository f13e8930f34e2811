"""A training run's part of the report, like a page of a lab notebook: the verdict, then the curves behind it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, fsum
from typing import Any

from loopwright.ledger.steps import Step
from loopwright.reports.markup import Html, duration, html, join, number, short, table
from loopwright.reports.training.digest import (
    Interval,
    TrainingDigest,
    bounds,
    is_number,
    passes,
    troubles,
    value_of,
    verdict,
)

_POINTS = 240
"""More steps than this are drawn several together: their mean, and from the lowest to the highest."""
_EVALS = 12
_CURVES = 40
_ASIDE = ("version", "episodes", "trained_episodes", "updates", "skipped", "in_flight", "tokens", "reward")
"""Numbers that are told elsewhere, or that are no curve."""


@dataclass(frozen=True)
class Told:
    """What a number is called on the page, and what it means."""

    title: str
    meaning: str = ""


_LEARNED = "per token learned from: rollouts without an advantage may be left out"
_TOLD = {
    "kl": Told("KL", "how far the policy has moved from the one that it is held to"),
    "mismatch_kl": Told("mismatch", f"KL of the learner's policy from the one that sampled, {_LEARNED}"),
    "entropy": Told("entropy", f"how undecided it is, {_LEARNED}"),
    "clip_fraction": Told("clip fraction", f"share that was not let move further, {_LEARNED}"),
    "grad_norm": Told("gradient norm", "before it was shortened"),
    "loss": Told("loss"),
    "reward_std": Told("spread of rewards", "within a batch"),
    "length": Told("length", "sampled tokens per rollout"),
    "turns": Told("turns", "per rollout"),
    "staleness": Told("staleness", "versions that tokens are behind"),
    "importance": Told("importance", f"against recorded logprobs, {_LEARNED}"),
    "tokens_per_s": Told("throughput", "tokens trained on per second"),
    "reward_all": Told("reward of all", "of the groups that were left out, too"),
    "filtered": Told("filtered groups", "left out, as all their rewards were equal"),
    "failed": Told("failed groups", "left out, as none of their rollouts counts"),
    "fault_rate": Told("fault rate", "share of rollouts lost, by no fault of the policy"),
    "lr": Told("step size"),
}
_PHASES = {"rollout_s": "waiting for rollouts", "train_s": "training"}


# -- the verdict ----------------------------------------------------------------------------------------------------


def training_answer(digest: TrainingDigest) -> Html:
    """Whether the policy got better."""
    parts = [html("<p class='verdict'>{}</p>", verdict(digest))]
    if digest.ends is not None:
        first, last = (step.numbers for step in digest.ends)
        left = html(
            "<div><div class='what'>Mean reward on held-out tasks</div><div class='value'>{} → {}</div>"
            "<p class='{}'>{}</p></div>",
            number(first["reward"], 3),
            number(last["reward"], 3),
            *_word(digest.change),
        )
        names = ["reward", *passes(digest)]
        rows = [[name, *(_measured(numbers, name) for numbers in (first, last))] for name in names]
        head = ["", *(f"after step {number(s.step)}" if s.step else "before training" for s in digest.ends)]
        parts.append(html("<div class='answer'>{}<div>{}</div></div>", left, table(head, rows, "wide")))
    parts += [html("<p class='note'>{}</p>", trouble) for trouble in troubles(digest)]
    return join(parts)


def _word(change: Interval | None) -> tuple[str, str]:
    """How the change is coloured and called."""
    if change is None:
        return "muted", "too few tasks to tell"
    _, low, high = change
    if low > 0:
        return "gain", "better, by more than chance"
    return ("loss", "worse") if high < 0 else ("muted", "may be chance")


def _measured(numbers: Mapping[str, Any], name: str) -> Html:
    mean, told = number(numbers.get(name), 3), bounds(numbers, name)
    return html("<span class='number'>{}</span> <span class='muted number'>95 %: {}</span>", mean, told)


def training_facts(digest: TrainingDigest) -> Html:
    """How much was done."""
    total = digest.rolled.total
    spent = [fsum(step.numbers.get(phase) or 0.0 for step in digest.train) for phase in _PHASES]
    facts = {
        "steps": f"{number(digest.taken)} of {number(digest.planned)}",
        "rollouts": number(total.ended),
        "without a reward": number(digest.unscored),
        "sampled tokens": number(total.tokens),
        "evaluations": number(len(digest.evals)),
    }
    if digest.wall_s:
        facts["wall time"] = duration(digest.wall_s)
    facts |= {told: duration(seconds) for told, seconds in zip(_PHASES.values(), spent, strict=True) if seconds}
    listed = join(html("<div><dt>{}</dt><dd>{}</dd></div>", name, value) for name, value in facts.items())
    return html("<dl class='facts'>{}</dl>", listed)


def training_evaluations(digest: TrainingDigest) -> Html:
    """What each evaluation measured; an even share of too many."""
    if not digest.evals:
        return Html("")
    shown = _evenly(digest.evals, _EVALS)
    names = ["reward", *passes(digest)]
    rows = [
        [
            number(step.step),
            *(_measured(step.numbers, name) for name in names),
            number(step.numbers.get("rollouts")),
            number(step.numbers.get("faults")),
        ]
        for step in shown
    ]
    left_out = len(digest.evals) - len(shown)
    note = html("<p><small>{} more are left out here.</small></p>", number(left_out)) if left_out else Html("")
    head = ["after step", *names, "rollouts", "without a reward"]
    return html("<h3>Evaluations</h3>{}{}", table(head, rows, "wide"), note)


def training_settings(digest: TrainingDigest) -> Html:
    """How it was trained."""
    rows = [[name, html("<span class='mono'>{}</span>", short(value, 200))] for name, value in digest.agent.items()]
    half = ceil(len(rows) / 2)
    halves = [table(["", ""], part, "wide facts") for part in (rows[:half], rows[half:]) if part]
    return html("<h3>Settings</h3><div class='pair'>{}</div>", join(halves)) if rows else Html("")


# -- curves ---------------------------------------------------------------------------------------------------------


def training_chart(digest: TrainingDigest) -> dict[str, Any]:
    """The curves as columns, thinned where there are too many steps to draw."""
    train = [Step(step.step, step.at, {**step.numbers, **_speed(step)}) for step in digest.train]
    names = dict.fromkeys([*_TOLD, *(name for step in train for name in step.numbers)])
    single = {name: _points(train, name) for name in names if name not in _ASIDE and name not in _PHASES}
    varied = {name: points for name, points in single.items() if len({value for _, value in points}) > 1}
    curves = [_curve("reward", "", [_line("training", _points(train, "reward")), *_held_out(digest, ["reward"])])]
    curves += [_curve("pass@k", "held-out tasks solved in one of k attempts", _held_out(digest, passes(digest)))]
    curves += [_curve(_told(name).title, _told(name).meaning, [_line("", points)]) for name, points in varied.items()]
    phases = [_line(told, _points(train, phase)) for phase, told in _PHASES.items()]
    curves.append(_curve("seconds per step", "", phases))
    return {
        "labels": digest.labels,
        "curves": [curve for curve in curves if curve["lines"]][:_CURVES],
        "steps": max((step.step for step in (*digest.train, *digest.evals)), default=1),
        "skipped": _evenly(sorted({*digest.skipped, *digest.empty}), 200),
        "level": {_told(name).title: points[0][1] for name, points in single.items() if name not in varied and points},
        "thinned": len(digest.train) > _POINTS,
    }


def training_level(chart: Mapping[str, Any]) -> Html:
    """What has no curve, as it never changed, and how the rest is drawn."""
    said = [f"{name} {number(value, 3)}" for name, value in chart["level"].items()]
    parts = [f"The same in every step: {', '.join(said)}."] if said else []
    if chart["thinned"]:
        parts.append(
            f"Of more than {_POINTS} steps several are drawn together: their mean, from the lowest to the highest."
        )
    return html("<p><small>{}</small></p>", " ".join(parts)) if parts else Html("")


def training_key(curve: Mapping[str, Any], skipped: Sequence[int] = ()) -> Html:
    """What the lines and marks of a curve mean, where there are several."""
    lines = curve["lines"]
    marks = [(f"stroke c{place}", line["name"]) for place, line in enumerate(lines) if len(lines) > 1]
    wide = any(line["marked"] and any(row[2] < row[3] for row in line["rows"]) for line in lines)
    marks += [("band", "95 % interval")] if wide else []
    marks += [("tick", "a step that changed nothing")] if skipped else []
    return html(
        "<div class='key'>{}</div>",
        join(html("<span><i class='{}'></i>{}</span>", mark, text) for mark, text in marks),
    )


def _told(name: str) -> Told:
    return _TOLD.get(name) or Told(name.replace("_", " "))


def _speed(step: Step) -> dict[str, float]:
    tokens, spent = step.numbers.get("tokens"), [step.numbers.get(phase) for phase in _PHASES]
    if not is_number(tokens) or not all(map(is_number, spent)) or not fsum(s or 0.0 for s in spent):
        return {}  # a step that was repeated after a crash waited for no rollouts
    return {"tokens_per_s": float(tokens or 0.0) / fsum(s or 0.0 for s in spent)}


def _points(steps: Sequence[Step], name: str) -> list[tuple[int, float]]:
    return [(step.step, value) for step in steps if (value := value_of(step, name)) is not None]


def _curve(title: str, meaning: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"title": title, "meaning": meaning, "lines": [line for line in lines if line["rows"]]}


def _line(name: str, points: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Step, mean, lowest, highest and last step of each point."""
    size = max(1, ceil(len(points) / _POINTS))
    rows = []
    for start in range(0, len(points), size):
        some = points[start : start + size]
        values = [value for _, value in some]
        mean = fsum(values) / len(values)
        rows.append([some[0][0], *map(_rounded, (mean, min(values), max(values))), some[-1][0]])
    return {"name": name, "rows": rows, "marked": False}


def _held_out(digest: TrainingDigest, names: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "name": "held-out" if name == "reward" else name,
            "rows": [
                [step.step, *_bounded(step.numbers, name), step.step]
                for step in _evenly(digest.measured, _POINTS)
                if is_number(step.numbers.get(name))
            ],
            "marked": True,
        }
        for name in names
    ]


def _bounded(numbers: Mapping[str, Any], name: str) -> list[float]:
    """The mean and its bounds; the mean again where these are unknown."""
    mean = numbers[name]
    ends = [numbers.get(f"{name}_{end}") for end in ("low", "high")]
    return [_rounded(mean), *(_rounded(end) if is_number(end) else _rounded(mean) for end in ends)]


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Up to so many of them, the first and the last among these."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]
