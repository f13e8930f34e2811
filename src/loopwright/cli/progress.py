"""Progress of a run: trials, failures, best so far, curves and time left; for a terminal, a log, or as JSON lines."""

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from loopwright.cli.options import emit
from loopwright.cli.training_progress import TrainingProgress
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Trial
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.observer import Observer
from loopwright.ledger.steps import Kind, Step
from loopwright.reports.formatting import duration, number
from loopwright.reports.kinds import kind_of
from loopwright.reports.live.digest import read_live
from loopwright.reports.live.policy import comparison
from loopwright.reports.rollout.digest import read_rollouts, rollout_result
from loopwright.reports.search.best import best_of
from loopwright.reports.training.digest import read_training, training_result
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.kinds.base import AnyEnv, LoadedScenario

_LOG_INTERVAL_S = 10.0
_DRAW_INTERVAL_S = 0.1
_MAX_CANDIDATES = 10
_MAX_REASONS = 3


class RunProgress(Observer):
    """Counts the outcomes of a run's trials, those before a resume included."""

    training_parts: ClassVar[int | None] = None
    """How many facts about a training its line starts with; by default all of them."""

    def __init__(self, env: AnyEnv) -> None:
        book = env.book
        about = book.ledger.state("run")
        self.name, self.has_rollouts = book.name, about["rollout"] is not None
        self.total: int | None = about["budget"]
        self.label = (*about["objectives"], "")[0]
        self.cached_are_free = not book.count_cached
        self.training = TrainingProgress.of(book.ledger)
        self.scored, self.reward_sum = 0, 0.0
        self.cached, self.failed, self.done = book.ledger.counts()["cached"], 0, 0
        self.best: Trial | None = None
        for trial in book.ledger.trials():
            if not trial.unfinished:
                self._count(trial)
        self.done_before, self.started = self.done, time.monotonic()

    def after(self, trial: Trial) -> None:
        if trial.outcome is not Outcome.ABORTED:
            self.cached += trial.cached_from is not None
            self._count(trial)
        self.show(trial)

    def after_step(self, kind: Kind, step: Step) -> None:
        if self.training is not None:
            self.training.add(kind, step)
        self.show_step(kind, step)

    def _count(self, trial: Trial) -> None:
        self.done += 1
        self.failed += trial.outcome is not Outcome.OK
        if trial.reward:
            self.scored += 1
            self.reward_sum += trial.reward.value
        if trial.reward and (
            self.best is None or self.best.reward is None or trial.reward.value > self.best.reward.value
        ):
            self.best = trial

    def show(self, trial: Trial) -> None:
        """Show the state after a trial."""

    def show_step(self, kind: Kind, step: Step) -> None:
        """Show the state after a step of a training."""

    def finish(self) -> None:
        """Show the final state."""

    @property
    def seconds_left(self) -> float | None:
        """The time left at the speed so far."""
        if self.training is not None:
            return self.training.seconds_left
        new = self.done - self.done_before
        if not self.total or not new:
            return None
        return (time.monotonic() - self.started) / new * max(0, self.total - self.done)

    def line(self) -> str:
        """The state of the run in one line."""
        counted, total = self.done - (self.cached if self.cached_are_free else 0), self.total
        unscored = self.done - self.scored
        if self.training is not None:
            counted, total = self.training.done, self.training.total
            parts = [*self.training.parts()[: self.training_parts], f"{number(self.done)} rollouts"]
            parts += [f"{number(unscored)} without a reward"] if unscored else []
            parts += self.training.speed()
        elif self.has_rollouts:
            parts = [f"{self.done}/{total or '?'} rollouts"]
            parts += [f"mean reward {number(self.reward_sum / self.scored, 3)}"] if self.scored else []
            parts.append(f"{unscored} without a reward")
        else:
            parts = [f"{counted}/{total or '?'} done", f"{self.failed} failed", f"{self.cached} cached"]
            if self.best is not None and self.best.reward is not None:
                parts.append(f"best {self.label} = {self.best.reward.value:.6g} (trial {self.best.number})")
        left = self.seconds_left
        if left is not None and counted < (total or 0):
            parts.append(f"{duration(max(1, round(left)))} left")
        return f"{self.name}: {', '.join(parts)}"


class LogLines(RunProgress):
    """A line every ten seconds, for when stdout is not a terminal; also one after each evaluation of a training."""

    def __init__(self, env: AnyEnv) -> None:
        super().__init__(env)
        self._next = time.monotonic()

    def show_step(self, kind: Kind, step: Step) -> None:
        if kind == "eval":
            self._next = 0.0
        self.show()

    def show(self, trial: Trial | None = None) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _LOG_INTERVAL_S
            print(self.line(), flush=True)

    def finish(self) -> None:
        print(self.line(), flush=True)


class ProgressBar(RunProgress):
    """A progress bar for a terminal, with the curves of a training."""

    training_parts: ClassVar[int | None] = 1  # the others are drawn below

    def __init__(self, env: AnyEnv) -> None:
        super().__init__(env)
        self._progress = Progress(
            SpinnerColumn(), BarColumn(bar_width=30), TextColumn("{task.fields[line]}", markup=False)
        )
        total = self.total if self.training is None else self.training.total
        self._task = self._progress.add_task("", total=total, completed=self.completed, line=self.line())
        # If stderr is a file, what is logged goes there unchanged.
        self._live = Live(self._render(), redirect_stderr=sys.stderr.isatty())
        self._drawn_at = 0.0
        self._live.start()

    @property
    def completed(self) -> int:
        """The length of the bar."""
        return self.done if self.training is None else self.training.done

    def _render(self) -> Any:
        return self._progress if self.training is None else Group(self._progress, self.training.curves())

    def show_step(self, kind: Kind, step: Step) -> None:
        self.show()

    def show(self, trial: Trial | None = None) -> None:
        # Not after every trial: drawing costs more than a small trial does.
        now = time.monotonic()
        if now - self._drawn_at > _DRAW_INTERVAL_S:
            self._drawn_at = now
            self._redraw()

    def _redraw(self) -> None:
        self._progress.update(self._task, completed=self.completed, line=self.line())
        if self.training is not None:  # made here, where steps are added, and not in the thread that draws
            self._live.update(self._render())

    def finish(self) -> None:
        self._redraw()
        self._live.stop()


class JsonEvents(RunProgress):
    """One JSON object per trial, and per step of a training."""

    def show_step(self, kind: Kind, step: Step) -> None:
        training = self.training
        totals = {} if training is None else {"done": training.done, "total": training.total}
        emit(
            {
                "event": "step",
                "run": self.name,
                "kind": kind,
                "step": step.step,
                "numbers": dict(step.numbers),
                **totals,
            }
        )

    def show(self, trial: Trial) -> None:
        event = {
            "event": "trial",
            "run": self.name,
            "trial": trial.number,
            "outcome": trial.outcome,
            "fault": trial.fault,
            "reason": trial.reason,
            "reward": trial.reward.objectives if trial.reward else None,
            "action": trial.action,
            "env_params": trial.regime,
            "metrics": trial.metrics,
            "cached_from": trial.cached_from,
            "done": self.done,
            "total": self.total,
        }
        emit(event)


def run_with_progress(loaded: LoadedScenario, output: Path, *, quiet: bool, json: bool, **options: Any) -> int:
    """Run a scenario, show its progress, and print the results at the end."""
    display: type[RunProgress] = LogLines
    if quiet:
        display = RunProgress
    elif json:
        display = JsonEvents
    elif sys.stdout.isatty():
        display = ProgressBar
    current: list[RunProgress] = []

    def watch(env: AnyEnv) -> list[Observer]:
        for progress in current:
            progress.finish()
        current[:] = [display(env)]
        return list(current)

    try:
        code = dispatch(loaded, output, watch=watch, **options)
    finally:
        for progress in current:
            progress.finish()
    for run in loaded.runs:
        path = output / run.name / "ledger.db"
        if path.exists():
            _print_result(run.name, path, json=json)
    if json:
        emit({"event": "end", "code": code, "output": str(output)})
    else:
        print(f"report: {output / 'report.html'}")
        if code > 128:
            print(f"stopped; continue with: loopwright resume {output}")
    return code


def _print_result(name: str, path: Path, *, json: bool) -> None:
    with Ledger.read(path) as ledger:
        event, lines = _RESULTS[kind_of(ledger.state("run", {}))](ledger)
        if failure := ledger.state("failure"):
            event["failure"] = failure
            lines.append(f"failed: {failure.strip().splitlines()[-1]}")
    if json:
        emit({"event": "result", "run": name, **event})
    else:
        print("\n".join([f"{name}: {lines[0]}", *(f"  {line}" for line in lines[1:])]))


def _search_result(ledger: Ledger) -> tuple[dict[str, Any], list[str]]:
    """The best actions of a search."""
    counts, about, best = ledger.counts(), ledger.state("run", {}), best_of(ledger.trials())
    by_regime = about.get("conditions_on_regime")
    candidates = best.by_regime if by_regime else best.front
    lines = [f"{counts.get('ok', 0)} ok of {sum(counts.values()) - counts['cached']} trials"]
    for candidate in candidates[:_MAX_CANDIDATES]:
        under = f"   under {_pairs(candidate.regimes[0])}" if by_regime else ""
        reward = dict(zip(about["objectives"], (f"{value:.6g}" for value in candidate.objectives), strict=True))
        lines.append(f"best  {_pairs(reward, ' = ')}   with   {_pairs(candidate.action)}{under}")
    if len(candidates) > _MAX_CANDIDATES:
        lines.append(f"and {len(candidates) - _MAX_CANDIDATES} more, in best.toml")
    event: dict[str, Any] = {
        "counts": counts,
        "best": [
            {"action": c.action, "regimes": c.regimes, "reward": c.objectives, "trials": c.trials} for c in candidates
        ],
    }
    policy = comparison(ledger.state("policy"))
    if policy is not None:
        lines.append(f"policy, measured at the end: {policy.verdict(about['objectives'][0])}")
        event["policy"] = policy.alone if policy.means is None else policy.means[0]
        if policy.means is not None:
            event["static"] = policy.means[1]
    if not counts.get("ok"):
        reasons = Counter(f"{trial.outcome}: {trial.reason}" for trial in ledger.trials() if trial.reason)
        lines += [f"{count} × {reason}" for reason, count in reasons.most_common(_MAX_REASONS)]
    return event, lines


def _live_result(ledger: Ledger) -> tuple[dict[str, Any], list[str]]:
    """The returns of a live run."""
    digest = read_live(ledger)
    episodes = digest.episodes
    count, mean = episodes.total.count + episodes.failed, episodes.after if episodes.total.count else None
    lines = [f"{digest.steps:,} steps in {count:,} episodes" + (f", {digest.failed:,} failed" if digest.failed else "")]
    if mean is not None:
        window = episodes.window
        what = f"mean return of the last {window} episodes" if window > 1 else "return of the last episode"
        lines.append(f"{what}: {mean:.6g} (of the first{f' {window}' if window > 1 else ''}: {episodes.before:.6g})")
    for failure in digest.failures()[:_MAX_REASONS]:
        lines += [f"{len(numbers)} × {failure.outcome}: {reason}" for reason, numbers in failure.reasons[:1]]
    return {"counts": ledger.counts(), "episodes": count, "mean_return": mean}, lines


_RESULTS: dict[str, Callable[[Ledger], tuple[dict[str, Any], list[str]]]] = {
    "search": _search_result,
    "live": _live_result,
    "rollout": lambda ledger: rollout_result(read_rollouts(ledger)),
    "training": lambda ledger: training_result(read_training(ledger)),
}
"""The result of each kind of run, for scripts and for people."""


def _pairs(values: Any, equals: str = "=") -> str:
    return "  ".join(f"{name}{equals}{value}" for name, value in values.items()) or "(nothing to choose)"
