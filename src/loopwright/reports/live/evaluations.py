"""What an RL training measured: evaluations of its policy, in a live run beside a random one, and its updates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

from loopwright.ledger.ledger import Ledger
from loopwright.ledger.steps import Step, steps
from loopwright.reports.formatting import evenly, number
from loopwright.reports.live.statistics import Difference, aggregate, probability_of_improvement, stratified_difference

_POINTS = 300
_TITLES = {
    "approx_kl": "KL divergence",
    "entropy_loss": "entropy loss",
    "explained_variance": "explained variance",
    "learning_rate": "learning rate",
    "clip_fraction": "clipped share",
}
_ASIDE = ("n_updates", "clip_range", "length", "return", "steps_per_s")


@dataclass(frozen=True)
class SeedResult:
    """The evaluations of the policy that one seed trained."""

    seed: int
    last: Step
    best: Step
    best_step: int
    """The step of the best one, counted from the start of this seed's training."""
    baseline: Sequence[float]
    """Returns of a random policy in the same episodes."""


@dataclass(frozen=True)
class Evaluations:
    """Everything that was measured beside the training episodes."""

    evals: Sequence[Step] = ()
    train: Sequence[Step] = ()
    baselines: Mapping[int, Sequence[float]] = field(default_factory=dict)
    trials: int = 0
    """The budget of one seed: the next one begins after it."""
    videos: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """An episode of the last and one of the best policy: `step`, `seed`, `return`, and `png` in base64."""

    @classmethod
    def read(cls, ledger: Ledger) -> "Evaluations":
        """From the ledger; empty unless an agent was trained."""
        if not ledger.transaction.rows("SELECT 1 FROM sqlite_schema WHERE name = 'steps'"):
            return cls()
        evals = list(steps(ledger, "eval"))
        seeds = dict.fromkeys(step.numbers.get("seed", 0) for step in evals)
        baselines = {seed: ledger.state(f"baseline {seed}") or () for seed in seeds}
        agent = ledger.state("run", {}).get("agent") or {}
        videos = {name: video for name in ("best", "last") if (video := ledger.state(f"video {name}"))}
        if len(videos) == 2 and videos["best"]["step"] == videos["last"]["step"]:
            del videos["best"]  # the last policy is the best one
        return cls(evals, list(steps(ledger, "train")), baselines, agent.get("trials") or 0, videos)

    @cached_property
    def results(self) -> list[SeedResult]:
        """The last and the best evaluation of each seed."""
        results = []
        for place, (seed, baseline) in enumerate(self.baselines.items()):
            own = [step for step in self.evals if step.numbers.get("seed", 0) == seed]
            best = max(own, key=lambda step: (score(step), step.step))
            results.append(SeedResult(seed, own[-1], best, best.step - place * self.trials, baseline))
        return results

    @property
    def change(self) -> Difference | None:
        """How the last policy differs from a random one, over the same episodes of every seed."""
        return stratified_difference([(one.last.numbers["returns"], one.baseline) for one in self.results])

    @property
    def scores(self) -> list[float]:
        """The mean return of the last evaluation of each seed."""
        return [score(one.last) for one in self.results]

    @cached_property
    def interquartile_mean(self) -> Difference:
        """Of the scores of all seeds, with its bootstrap interval."""
        return aggregate([self.scores])

    @cached_property
    def improvement(self) -> Difference | None:
        """The probability that a trained policy is better than a random one, with its interval."""
        random = [fmean(one.baseline) for one in self.results if one.baseline]
        return probability_of_improvement([self.scores], [random]) if random else None

    def verdict(self) -> str:
        """The result in a few words."""
        if len(self.results) > 1:
            mean = self.interquartile_mean
            interval = f"95 % interval {number(mean.low)} to {number(mean.high)}"
            return f"interquartile mean {number(mean.mean)} ({interval}) over {len(self.results)} seeds"
        step = self.results[0].last
        count = len(step.numbers["returns"])
        return f"mean return {number(step.numbers['return'])} in {count} evaluation episodes"

    def curves(self) -> list[dict[str, Any]]:
        """The evaluations and the numbers of the updates, to be drawn by step."""
        lines: list[dict[str, Any]] = []
        for place, one in enumerate(self.results):
            own = [step for step in self.evals if step.numbers.get("seed", 0) == one.seed]
            lines.append(
                {"name": f"seed {one.seed}", "marked": True, "rows": [_row(s, place * self.trials) for s in own]}
            )
        curves = []
        if lines:
            is_live = "return" in self.evals[0].numbers
            title, meaning = (
                ("return", "95 % interval over its episodes") if is_live else ("reward", "mean over regimes")
            )
            curves.append({"title": f"evaluation {title}", "meaning": meaning, "lines": lines})
        names = dict.fromkeys(name for step in self.train for name in step.numbers if name not in _ASIDE)
        for name in [*(title for title in _TITLES if title in names), *(n for n in names if n not in _TITLES)]:
            points = [step for step in self.train if isinstance(step.numbers.get(name), float | int)]
            lines = self._lines_by_seed(points, name)
            if len({row[1] for line in lines for row in line["rows"]}) > 1:
                curves.append({"title": _TITLES.get(name, name.replace("_", " ")), "meaning": "", "lines": lines})
        return curves[:12]

    def _lines_by_seed(self, points: Sequence[Step], name: str) -> list[dict[str, Any]]:
        """A line per seed, each over its own steps."""
        by_seed: dict[int, list[Step]] = {}
        for step in points:
            by_seed.setdefault((step.step - 1) // self.trials if self.trials else 0, []).append(step)
        lines: list[dict[str, Any]] = []
        for place, own in by_seed.items():
            before = place * self.trials
            rows = [[s.step - before, *[s.numbers[name]] * 3, s.step - before] for s in evenly(own, _POINTS)]
            lines.append({"name": f"seed {place + 1} of {len(by_seed)}", "marked": False, "rows": rows})
        return lines


def score(step: Step) -> float:
    """The mean return of an evaluation; of a batch run, the mean reward."""
    return float(step.numbers["return"] if "return" in step.numbers else step.numbers["reward"])


def curve_marks(curves: Sequence[Mapping[str, Any]]) -> list[list[tuple[str, str]]]:
    """The key of each curve that has several lines."""
    return [
        [(f"stroke c{place}", line["name"]) for place, line in enumerate(curve["lines"]) if len(curve["lines"]) > 1]
        for curve in curves
    ]


def _row(step: Step, before: int) -> list[float]:
    mean = score(step)
    low, high = (step.numbers.get(f"return_{end}") for end in ("low", "high"))
    own = step.step - before
    return [own, mean, mean if low is None else low, mean if high is None else high, own]
