"""Progress of a run: trials, failures, best so far, curves and time left; for a terminal or a log."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from loopwright.core.outcome import Outcome
from loopwright.core.trial import Trial, key_of
from loopwright.ledger.steps import Kind, Step
from loopwright.ledger.trial_book import Observer, TrialBook
from loopwright.reports import formatting
from loopwright.reports.formatting import duration, number
from loopwright.reports.objective import Objective
from loopwright.reports.training.progress import TrainingProgress
from loopwright.selection.estimate import RegimeWeights, estimate

_LOG_INTERVAL_S = 10.0
_DRAW_INTERVAL_S = 0.1


class RunProgress(Observer):
    """Counts the outcomes of a run's trials, those before a resume included."""

    training_parts: ClassVar[int | None] = None
    """How many facts about a training its line starts with; by default all of them."""

    def __init__(self, book: TrialBook, file: TextIO) -> None:
        self.file = file
        about = book.ledger.state("run")
        self.name, self.has_rollouts = book.name, about["rollout"] is not None
        self.is_live = bool(about.get("live"))
        self.evaluation: float | None = None
        """The mean return of the latest evaluation of a live run."""
        # A remeasurement goes beyond the budget that is recorded with the run.
        self.total: int | None = None if about["budget"] is None else max(about["budget"], book.budget or 0)
        self.objectives = [Objective.of(label) for label in about["objectives"]]
        self._weight = RegimeWeights(about)
        self.cached_are_free = not book.count_cached
        self.training = TrainingProgress.of(book.ledger)
        counts = book.ledger.counts()
        self.cached = counts.pop("cached")
        self.done = sum(count for name, count in counts.items() if name not in ("running", Outcome.ABORTED))
        self.stopped = counts.get(Outcome.STOPPED, 0)
        self.failed = self.done - self.stopped - counts.get(Outcome.OK, 0)
        self.scored, self.reward_sum, self.best = book.ledger.rewards()
        self.fresh: dict[str, list[Trial]] = {}
        """The fresh measurements of each finalist."""
        for trial in book.ledger.trials(where="phase = 'confirm'") if self.done else ():
            self._confirm(trial)
        # The first step of a live run also waits for the library and the server, so it says nothing about the speed.
        self.done_before, self.started = self.done + self.is_live, time.monotonic()
        self._running: set[int] = set()

    def before(self, trial: Trial) -> None:
        if not self._running and self.done == self.done_before:
            self.started = time.monotonic()  # what came before, such as loading a model, is not repeated
        self._running.add(trial.number)

    def after(self, trial: Trial) -> None:
        self._running.discard(trial.number)
        if trial.outcome is not Outcome.ABORTED:
            self.cached += trial.cached_from is not None
            if self.done < self.done_before:
                self.started = time.monotonic()
            self._count(trial)
        self.show(trial)

    def after_step(self, kind: Kind, step: Step) -> None:
        if self.training is not None:
            self.training.add(kind, step)
        elif kind == "eval":
            self.evaluation = step.numbers.get("return")
        self.show_step(kind, step)

    def _count(self, trial: Trial) -> None:
        self.done += 1
        self.stopped += trial.outcome is Outcome.STOPPED
        self.failed += trial.outcome not in (Outcome.OK, Outcome.STOPPED)
        if trial.reward:
            self.scored += 1
            self.reward_sum += trial.reward.value
        if trial.phase:
            self._confirm(trial)
        elif trial.reward and (
            self.best is None or self.best.reward is None or trial.reward.value > self.best.reward.value
        ):
            self.best = trial

    def _confirm(self, trial: Trial) -> None:
        if trial.phase == "confirm" and trial.reward:
            self.fresh.setdefault(key_of(trial.action), []).append(trial)

    def show(self, trial: Trial) -> None:
        """Show the state after a trial."""

    def show_step(self, kind: Kind, step: Step) -> None:
        """Show the state after a step of a training."""

    def finish(self) -> None:
        """Show the final state."""

    @property
    def seconds_left(self) -> float | None:
        """The time left at the speed so far, where trials that are running count as half done."""
        if self.training is not None:
            return self.training.seconds_left
        new, half = self.done - self.done_before, len(self._running) / 2
        if not self.total or new < 1:
            return None
        return (time.monotonic() - self.started) / (new + half) * max(0.0, self.total - self.done - half)

    def line(self) -> str:
        """The state of the run in one line."""
        counted, total = self.done - (self.cached if self.cached_are_free else 0), self.total
        unscored = self.done - self.scored
        if self.training is not None:
            counted, total = self.training.done, self.training.total
            parts = [*self.training.parts()[: self.training_parts], *self.training.notes()]
            parts.append(formatting.counted(self.done, "rollout"))
            parts += [f"{number(unscored)} without a reward"] if unscored else []
            parts += self.training.speed()
        elif self.has_rollouts:
            parts = [f"{self.done}/{total or '?'} rollouts"]
            parts += [f"mean reward {number(self.reward_sum / self.scored, 3)}"] if self.scored else []
            parts.append(f"{unscored} without a reward")
        elif self.is_live:  # the reward of a single step says nothing
            parts = [f"{counted}/{total or '?'} steps", f"{self.failed} failed"]
            parts += [f"mean return {number(self.evaluation)} in evaluation"] if self.evaluation is not None else []
        else:
            parts = [f"{counted}/{total or '?'} done", f"{self.failed} failed", f"{self.cached} cached"]
            parts += [f"{self.stopped} stopped"] if self.stopped else []
            if self.fresh:
                means, count = max((self._means(trials), len(trials)) for trials in self.fresh.values())
                measurements = formatting.counted(count, "fresh measurement")
                parts.append(f"confirming: best mean {self._values(means)} ({measurements})")
            elif self.best is not None and self.best.reward is not None:
                values = self._values(self.best.reward.objectives)
                parts.append(f"best {values} (trial {self.best.number}, measured once)")
        left = self.seconds_left
        if left is not None and counted < (total or 0):
            parts.append(f"{duration(max(1, round(left)))} left")
        return f"{self.name}: {', '.join(parts)}"

    def _means(self, trials: Sequence[Trial]) -> list[float]:
        """The mean of each objective, over the regimes with their weights."""
        weights = {key_of(trial.regime): self._weight(trial.regime) for trial in trials}
        rewards = [(key_of(trial.regime), trial.reward.objectives) for trial in trials if trial.reward]
        return [
            estimate([(regime, values[objective]) for regime, values in rewards], weights).mean
            for objective in range(len(self.objectives))
        ]

    def _values(self, rewards: Sequence[float]) -> str:
        """All objectives in their own units."""
        pairs = zip(self.objectives, rewards, strict=False)
        return ", ".join(f"{own.name} = {number(own.value(reward), 6)}" for own, reward in pairs)


class LogLines(RunProgress):
    """A line every ten seconds, for a file or a pipe; also one after each evaluation of a training."""

    def __init__(self, book: TrialBook, file: TextIO) -> None:
        super().__init__(book, file)
        self._next, self._printed = time.monotonic(), ""

    def show_step(self, kind: Kind, step: Step) -> None:
        if kind == "eval":
            self._next = 0.0
        self.show()

    def show(self, trial: Trial | None = None) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _LOG_INTERVAL_S
            self.finish()

    def finish(self) -> None:
        if (line := self.line()) != self._printed:
            self._printed = line
            print(line, file=self.file, flush=True)


class _StateColumn(TextColumn):
    """The line of a run; from a signal until the last trial has ended, also that it is stopping."""

    def __init__(self, book: TrialBook) -> None:
        super().__init__("{task.fields[line]}", markup=False, table_column=Column())  # wraps in a narrow terminal
        self._book = book

    def render(self, task: Task) -> Text:
        text = super().render(task)
        return text.append("; stopping, Ctrl-C again stops at once") if self._book.stopping else text


class ProgressBar(RunProgress):
    """A progress bar for a terminal, with the curves of a training."""

    training_parts: ClassVar[int | None] = 1  # the others are drawn below

    def __init__(self, book: TrialBook, file: TextIO) -> None:
        super().__init__(book, file)
        console = Console(file=file)
        self._progress = Progress(SpinnerColumn(), BarColumn(bar_width=30), _StateColumn(book), console=console)
        total = self.total if self.training is None else self.training.total
        self._task = self._progress.add_task("", total=total, completed=self.completed, line=self.line())
        # What is printed or logged into a file goes there unchanged.
        self._live = Live(
            self._render(),
            console=console,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
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


class HasBook(Protocol):
    """An environment of a run."""

    @property
    def book(self) -> TrialBook:
        """The trials of the run."""


@contextmanager
def show_progress(display: type[RunProgress] | None, file: TextIO) -> Iterator[Callable[[HasBook], Sequence[Observer]]]:
    """The `watch` argument of `dispatch`: a display of each run in turn. The default is a bar or log lines."""
    current: list[RunProgress] = []
    kind = display or (ProgressBar if file.isatty() else LogLines)

    def watch(env: HasBook) -> Sequence[Observer]:
        for progress in current:
            progress.finish()
        current[:] = [kind(env.book, file)]
        return list(current)

    try:
        yield watch
    finally:
        for progress in current:
            progress.finish()
