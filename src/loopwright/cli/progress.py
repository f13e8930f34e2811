"""Progress: done, failed, cached, best so far, curves and time left; for a terminal, for a log, or as JSON lines."""

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from loopwright.cli.training_progress import Course
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Trial
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.observer import Observer
from loopwright.ledger.steps import Kind, Step
from loopwright.reports.formatting import number
from loopwright.reports.kinds import kind_of
from loopwright.reports.live.digest import read_live
from loopwright.reports.live.policy import comparison
from loopwright.reports.rollout.digest import read_rollouts, rollout_result
from loopwright.reports.search.best import best_of
from loopwright.reports.training.digest import read_training, training_result
from loopwright.rollouts.env import RolloutEnv
from loopwright.scenario.build import AnyEnv, planned
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.load import LoadedScenario

_EVERY_S = 10.0
_MOST_ANSWERS = 10
_MOST_REASONS = 3


class Tally(Observer):
    """Counts what has become of a run's trials, those before a resume included."""

    def __init__(self, env: Any) -> None:
        self.name, self.total = env.book.name, planned(env)
        self.label = (*env.objectives.labels, "")[0]
        self.free = not env.book.count_cached
        self.rolls = isinstance(env, RolloutEnv)
        self.course = Course.of(env.book.ledger)
        self.scored, self.rewarded = 0, 0.0
        counts = env.book.ledger.counts()
        self.cached, self.failed, self.done = counts["cached"], 0, 0
        self.best: Trial | None = None
        for trial in env.book.ledger.trials():
            if not trial.unfinished:
                self._count(trial)
        self.before_now, self.started = self.done, time.monotonic()

    def after(self, trial: Trial) -> None:
        if trial.outcome is not Outcome.ABORTED:
            self.cached += trial.cached_from is not None
            self._count(trial)
        self.show(trial)

    def after_step(self, kind: Kind, step: Step) -> None:
        if self.course is not None:
            self.course.add(kind, step)
        self.show_step(kind, step)

    def _count(self, trial: Trial) -> None:
        self.done += 1
        self.failed += trial.outcome is not Outcome.OK
        if trial.reward:
            self.scored += 1
            self.rewarded += trial.reward.value
        if trial.reward and (
            self.best is None or self.best.reward is None or trial.reward.value > self.best.reward.value
        ):
            self.best = trial

    def show(self, trial: Trial) -> None:
        """Let the user see it."""

    def show_step(self, kind: Kind, step: Step) -> None:
        """Let the user see a step of a training."""

    def finish(self) -> None:
        """The run has ended."""

    @property
    def seconds_left(self) -> float | None:
        """How long the rest will take at the speed so far."""
        if self.course is not None:
            return self.course.seconds_left
        fresh = self.done - self.before_now
        if not self.total or not fresh:
            return None
        return (time.monotonic() - self.started) / fresh * max(0, self.total - self.done)

    def line(self) -> str:
        """The state of the run in one line."""
        counted, total = self.done - (self.cached if self.free else 0), self.total
        if self.course is not None:
            parts, counted, total = self._steps(self.course), self.course.done, self.course.total
        else:
            parts = self._rollouts() if self.rolls else self._trials(counted)
        left = self.seconds_left
        if left is not None and counted < (total or 0):
            parts.append(f"{_duration(left)} left")
        return f"{self.name}: {', '.join(parts)}"

    def _steps(self, course: Course) -> list[str]:
        lost = self.done - self.scored
        rolled = [f"{number(self.done)} rollouts", *([f"{number(lost)} without a reward"] if lost else [])]
        return [*self._curves_of(course), *rolled, *course.speed()]

    def _curves_of(self, course: Course) -> list[str]:
        return course.parts()

    def _trials(self, counted: int) -> list[str]:
        parts = [f"{counted}/{self.total or '?'} done", f"{self.failed} failed", f"{self.cached} cached"]
        if self.best is not None and self.best.reward is not None:
            parts.append(f"best {self.label} = {self.best.reward.value:.6g} (trial {self.best.number})")
        return parts

    def _rollouts(self) -> list[str]:
        parts = [f"{self.done}/{self.total or '?'} rollouts"]
        if self.scored:
            parts.append(f"mean reward {number(self.rewarded / self.scored, 3)}")
        return [*parts, f"{self.done - self.scored} without a reward"]


class LogLines(Tally):
    """A line now and then, for terminals that are none; of a training also one for every evaluation."""

    def __init__(self, env: AnyEnv) -> None:
        super().__init__(env)
        self._next = time.monotonic()

    def show_step(self, kind: Kind, step: Step) -> None:
        if kind == "eval":
            self._next = 0.0
        self.show()

    def show(self, trial: Trial | None = None) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY_S
            print(self.line(), flush=True)

    def finish(self) -> None:
        print(self.line(), flush=True)


class Bar(Tally):
    """A live line with a bar, for people; of a training also its curves."""

    def __init__(self, env: AnyEnv) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        super().__init__(env)
        self._progress = Progress(
            SpinnerColumn(), BarColumn(bar_width=30), TextColumn("{task.fields[line]}", markup=False)
        )
        total = self.total if self.course is None else self.course.total
        self._task = self._progress.add_task("", total=total, completed=self.completed, line=self.line())
        self._live = Live(self._drawn(), redirect_stderr=sys.stderr.isatty())  # into a file it goes as it is
        self._live.start()

    @property
    def completed(self) -> int:
        """How far the bar is."""
        return self.done if self.course is None else self.course.done

    def _curves_of(self, course: Course) -> list[str]:
        return course.parts()[:1]  # the others are drawn below

    def _drawn(self) -> Any:
        from rich.console import Group

        return self._progress if self.course is None else Group(self._progress, self.course.curves())

    def show_step(self, kind: Kind, step: Step) -> None:
        self.show()

    def show(self, trial: Trial | None = None) -> None:
        # The text is made only as often as the screen is drawn, or it would cost more than small trials do.
        now = time.monotonic()
        if now - getattr(self, "_shown", 0.0) > 0.1:
            self._shown = now
            self._redraw()

    def _redraw(self) -> None:
        self._progress.update(self._task, completed=self.completed, line=self.line())
        if self.course is not None:  # its curves are made here, not in the thread that draws, as steps are added here
            self._live.update(self._drawn())

    def finish(self) -> None:
        self._redraw()
        self._live.stop()


class JsonEvents(Tally):
    """One JSON object per trial, and per step of a training."""

    def show_step(self, kind: Kind, step: Step) -> None:
        of = {} if self.course is None else {"done": self.course.done, "total": self.course.total}
        _emit({"event": "step", "run": self.name, "kind": kind, "step": step.step, "numbers": dict(step.numbers), **of})

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
        _emit(event)


def conduct(loaded: LoadedScenario, output: Path, *, quiet: bool, json: bool, **options: Any) -> int:
    """Run a scenario with progress, and say at the end what was found and where it is."""
    kind: Callable[[AnyEnv], Tally] = (
        Tally if quiet else JsonEvents if json else Bar if sys.stdout.isatty() else LogLines
    )
    tallies: list[Tally] = []

    def watch(env: AnyEnv) -> list[Observer]:
        for tally in tallies:
            tally.finish()
        tallies[:] = [kind(env)]
        return list(tallies)

    try:
        code = dispatch(loaded, output, watch=watch, **options)
    finally:
        for tally in tallies:
            tally.finish()
    _conclude(output, [run.name for run in loaded.scenario.run], code, json=json)
    return code


def _conclude(output: Path, names: list[str], code: int, *, json: bool) -> None:
    for name in names:
        path = output / name / "ledger.db"
        if path.exists():
            with Ledger.read(path) as ledger:
                event, lines = _told(ledger)
                if failure := ledger.state("failure"):
                    event, lines = (
                        {**event, "failure": failure},
                        [*lines, f"failed: {failure.strip().splitlines()[-1]}"],
                    )
            if json:
                _emit({"event": "result", "run": name, **event})
            else:
                print("\n".join([f"{name}: {lines[0]}", *(f"  {line}" for line in lines[1:])]))
    if json:
        _emit({"event": "end", "code": code, "output": str(output)})
    else:
        print(f"report: {output / 'report.html'}")
        if code > 128:
            print(f"stopped; go on with: loopwright resume {output}")


def _told(ledger: Ledger) -> tuple[dict[str, Any], list[str]]:
    """What came of a run, for scripts and for people."""
    about = ledger.state("run", {})
    if about.get("rollout"):
        return (
            training_result(read_training(ledger))
            if kind_of(about) == "training"
            else rollout_result(read_rollouts(ledger))
        )
    return _live_result(ledger) if about.get("live") else _result(ledger)


def _result(ledger: Ledger) -> tuple[dict[str, Any], list[str]]:
    """The best actions of a batch run."""
    counts, run, best = ledger.counts(), ledger.state("run", {}), best_of(ledger.trials())
    answer = best.by_regime if run.get("conditions_on_regime") else best.front
    found = [{"action": c.action, "regimes": c.regimes, "reward": c.objectives, "trials": c.trials} for c in answer]
    lines = [f"{counts.get('ok', 0)} ok of {sum(counts.values()) - counts['cached']} trials"]
    for candidate in answer[:_MOST_ANSWERS]:
        under = f"   under {_shown(candidate.regimes[0])}" if run.get("conditions_on_regime") else ""
        reward = dict(zip(run["objectives"], (f"{value:.6g}" for value in candidate.objectives), strict=True))
        lines.append(f"best  {_shown(reward, ' = ')}   with   {_shown(candidate.action)}{under}")
    if len(answer) > _MOST_ANSWERS:
        lines.append(f"and {len(answer) - _MOST_ANSWERS} more, in best.toml")
    judged = comparison(ledger.state("policy"))
    if judged is not None:
        lines.append(f"policy, measured at the end: {judged.verdict(run['objectives'][0])}")
    if not counts.get("ok"):
        reasons = Counter(f"{trial.outcome}: {trial.reason}" for trial in ledger.trials() if trial.reason)
        lines += [f"{count} × {reason}" for reason, count in reasons.most_common(_MOST_REASONS)]
    means = judged.means if judged is not None else None
    compared = {} if judged is None else {"policy": judged.alone if means is None else means[0]}
    compared |= {} if means is None else {"static": means[1]}
    return {"counts": counts, "best": found, **compared}, lines


def _live_result(ledger: Ledger) -> tuple[dict[str, Any], list[str]]:
    """How the returns of a live run went."""
    digest = read_live(ledger)
    found = digest.episodes
    ended, mean = found.total.count + found.failed, found.after if found.total.count else None
    lines = [f"{digest.steps:,} steps in {ended:,} episodes" + (f", {digest.failed:,} failed" if digest.failed else "")]
    if mean is not None:
        many = found.window
        what = f"mean return of the last {many} episodes" if many > 1 else "return of the last episode"
        lines.append(f"{what}: {mean:.6g} (of the first{f' {many}' if many > 1 else ''}: {found.before:.6g})")
    for failure in digest.failures()[:_MOST_REASONS]:
        lines += [f"{len(numbers)} × {failure.outcome}: {reason}" for reason, numbers in failure.reasons[:1]]
    return {"counts": ledger.counts(), "episodes": ended, "mean_return": mean}, lines


def _shown(values: Any, equals: str = "=") -> str:
    return "  ".join(f"{name}{equals}{value}" for name, value in values.items()) or "(nothing to choose)"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _emit(event: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY))
    sys.stdout.buffer.flush()
