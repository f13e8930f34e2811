"""The page of a training run: the verdict, then the curves and episodes behind it."""

from collections.abc import Mapping, Sequence
from math import ceil, fsum
from typing import Any

from loopwright.ledger.ledger import Ledger
from loopwright.ledger.steps import Step
from loopwright.reports.formatting import duration, evenly, number
from loopwright.reports.rollout.page import tables
from loopwright.reports.rollout.samples import task_samples
from loopwright.reports.rollout.tokens import tokenizer_of
from loopwright.reports.training.before_after import before_after, trained_batches
from loopwright.reports.training.digest import (
    Interval,
    TrainingDigest,
    bounds,
    is_number,
    kinds,
    passes,
    value_of,
    verdict,
    warnings,
)

_POINTS = 240
"""If there are more steps than this, several share a point: their mean, lowest and highest."""
_CURVES = 40
_ASIDE = ("version", "episodes", "trained_episodes", "updates", "skipped", "in_flight", "tokens", "reward")
"""Numbers that have no curve, or are shown elsewhere."""


_TRAINED = "per trained token; rollouts without an advantage may be left out"
_TITLES: Mapping[str, tuple[str, str]] = {
    "kl": ("KL", "distance to the reference policy"),
    "mismatch_kl": ("mismatch", f"KL from the sampling policy to the learner's, {_TRAINED}"),
    "mismatch_max": ("largest mismatch", f"largest difference of logprobs, {_TRAINED}"),
    "entropy": ("entropy", f"of the policy, {_TRAINED}"),
    "clip_fraction": ("clip fraction", f"share of clipped ratios, {_TRAINED}"),
    "grad_norm": ("gradient norm", "before clipping"),
    "loss": ("loss", ""),
    "reward_std": ("spread of rewards", "within a batch"),
    "length": ("length", "sampled tokens per rollout"),
    "turns": ("turns", "per rollout"),
    "staleness": ("staleness", "how many policy versions old the tokens are"),
    "importance": ("importance", f"against recorded logprobs, {_TRAINED}"),
    "tokens_per_s": ("throughput", "tokens trained on per second"),
    "reward_all": ("reward of all", "including groups that were left out"),
    "filtered": ("filtered groups", "left out because all their rewards are equal"),
    "failed": ("failed groups", "left out because none of their rollouts counts"),
    "short": ("short groups", "left out because too few of their rollouts were judged"),
    "fault_rate": ("fault rate", "share of rollouts lost through no fault of the policy"),
    "lr": ("learning rate", ""),
    "truncation_rate": ("truncated", "share of rollouts that were cut off"),
    "length_reward": ("length and reward", "their correlation within a batch"),
    "control_rate": ("control tokens", "share of sampled tokens, ends of turns aside"),
    "repetition": ("repetition", "share of 4-grams that a turn has had before"),
}
_PHASES = {"rollout_s": "waiting for rollouts", "train_s": "training"}


def view(digest: TrainingDigest, chart: dict[str, Any]) -> dict[str, Any]:
    """The values of `templates/training.html`, in the order of a lab notebook: verdict, curves, episodes, settings."""
    with Ledger.read(digest.folder / "ledger.db") as ledger:
        tokenizer = tokenizer_of(digest.part("engine"), digest.folder)
        comparisons, batches = before_after(ledger, digest, tokenizer), trained_batches(ledger, digest, tokenizer)
        task_episodes = task_samples(ledger, tokenizer, digest.rollouts.hardest_trials)
    ends = digest.ends or ()
    return {
        **tables(),
        "task_episodes": task_episodes,
        "verdict": verdict(digest),
        "change": _change(digest.change),
        "end_titles": [f"after step {number(step.step)}" if step.step else "before training" for step in ends],
        "pass_names": [*passes(digest), *kinds(digest)],
        "bounds": bounds,
        "warnings": warnings(digest),
        "summary": _summary(digest),
        "curve_marks": [
            _curve_marks(curve, chart["skipped"] if index == 0 else ()) for index, curve in enumerate(chart["curves"])
        ],
        "curve_notes": _curve_notes(chart),
        "comparisons": comparisons,
        "batches": batches,
    }


def _change(change: Interval | None) -> tuple[str, str]:
    """How the change is coloured and described."""
    if change is None:
        return "muted", "too few tasks to tell"
    _, low, high = change
    if low > 0:
        return "gain", "better, by more than chance"
    return ("loss", "worse") if high < 0 else ("muted", "may be chance")


def _summary(digest: TrainingDigest) -> list[tuple[str, str]]:
    total = digest.rollouts.total
    rows = [
        ("steps", f"{number(digest.last_step)} of {number(digest.planned)}"),
        ("rollouts", number(total.ended)),
        ("trained on", number(digest.trained_rollouts)),
        ("without a reward", number(digest.unscored)),
        ("sampled tokens", number(total.tokens)),
        ("evaluations", number(len(digest.evals))),
    ]
    if digest.wall_s:
        rows.append(("wall time", duration(digest.wall_s)))
    phases = {title: fsum(step.numbers.get(phase) or 0.0 for step in digest.train) for phase, title in _PHASES.items()}
    return rows + [(title, duration(seconds)) for title, seconds in phases.items() if seconds]


# -- curves ---------------------------------------------------------------------------------------------------------


def chart_data(digest: TrainingDigest) -> dict[str, Any]:
    """The curves as columns, thinned if there are too many steps to draw."""
    train = []
    for step in digest.train:
        tokens = step.numbers.get("tokens")
        durations = [seconds for name in _PHASES if is_number(seconds := step.numbers.get(name))]
        speed = {}
        # A step that was repeated after a crash did not wait for rollouts; one that was skipped has no tokens.
        if is_number(tokens) and tokens and len(durations) == len(_PHASES) and (seconds := fsum(durations)):
            speed = {"tokens_per_s": tokens / seconds}
        train.append(Step(step.step, step.at, {**step.numbers, **speed}))
    names = dict.fromkeys([*_TITLES, *(name for step in train for name in step.numbers)])
    single = {name: _points(train, name) for name in names if name not in _ASIDE and name not in _PHASES}
    varied = {name: points for name, points in single.items() if len({value for _, value in points}) > 1}
    curves = [_curve("reward", "", [_line("training", _points(train, "reward")), *_held_out(digest, ["reward"])])]
    curves += [_curve("reward by kind", "held-out tasks of each source or kind", _held_out(digest, kinds(digest)))]
    curves += [_curve("pass@k", "held-out tasks solved in one of k attempts", _held_out(digest, passes(digest)))]
    curves += [_curve(*_title(n), [_line("", points)]) for n, points in varied.items()]
    phases = [_line(title, _points(train, phase)) for phase, title in _PHASES.items()]
    curves.append(_curve("seconds per step", "", phases))
    return {
        "labels": digest.labels,
        "curves": [curve for curve in curves if curve["lines"]][:_CURVES],
        "steps": max((step.step for step in (*digest.train, *digest.evals)), default=1),
        "skipped": evenly(sorted({*digest.skipped, *digest.empty}), 200),
        "level": {_title(name)[0]: points[0][1] for name, points in single.items() if name not in varied and points},
        "thinned": len(digest.train) > _POINTS,
    }


def _curve_notes(chart: Mapping[str, Any]) -> str:
    """The numbers that have no curve because they never changed, and how the rest is drawn."""
    constant = [f"{name} {number(value, 3)}" for name, value in chart["level"].items()]
    notes = [f"The same in every step: {', '.join(constant)}."] if constant else []
    if chart["thinned"]:
        notes.append(f"With more than {_POINTS} steps, each point is several steps: their mean, lowest and highest.")
    return " ".join(notes)


def _curve_marks(curve: Mapping[str, Any], skipped: Sequence[int]) -> list[tuple[str, str]]:
    """What the lines and marks of a curve mean, if there are several."""
    lines = curve["lines"]
    marks = [(f"stroke c{place}", line["name"]) for place, line in enumerate(lines) if len(lines) > 1]
    if any(line["marked"] and any(row[2] < row[3] for row in line["rows"]) for line in lines):
        marks.append(("band", "95 % interval"))
    return marks + ([("tick", "a step that changed nothing")] if skipped else [])


def _title(name: str) -> tuple[str, str]:
    """What a number is called on the page, and what it means."""
    return _TITLES.get(name) or (name.replace("_", " "), "")


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
                # The mean again if its bounds are unknown.
                [step.step, *(_rounded(end if is_number(end) else mean) for end in (mean, low, high)), step.step]
                for step in evenly(digest.measured, _POINTS)
                for mean, low, high in [[step.numbers.get(f"{name}{end}") for end in ("", "_low", "_high")]]
                if is_number(mean)
            ],
            "marked": True,
        }
        for name in names
    ]


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
