"""The trial book: the numbers, budget, ledger and observers of one run."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from loopwright.core.trial import Action, Phase, Regime, Result, Trial
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.steps import Kind, Step

log = logging.getLogger(__name__)


class RunStopped(BaseException):
    """Raised inside an agent's own loop once the run is stopping. Trials in flight are recorded as `aborted`.

    Not an Exception, so that a loop that survives every error of its trials still ends.
    """


class Observer:
    """Override any hook. The first two run for every trial: cached, infeasible, invalid and failed ones too.

    class Printer(Observer):
        def after(self, trial: Trial) -> None:
            print(trial.number, trial.outcome)
    """

    def before(self, trial: Trial) -> None:
        """The trial has its number and its action, and is about to start."""

    def after(self, trial: Trial) -> None:
        """The trial has ended and is in the ledger."""

    def after_step(self, kind: Kind, step: Step) -> None:
        """A training step or an evaluation has finished and is in the ledger."""


class Observers(list[Observer]):
    """All observers of a run. One that raises is logged and switched off: a broken logger must not end a run."""

    def notify(self, hook: Literal["before", "after", "after_step"], *event: Any) -> None:
        """Call a hook of every observer with a trial, or with the kind of a step and the step."""
        for observer in tuple(self):
            try:
                getattr(observer, hook)(*event)
            except Exception:
                where = f"step {event[1].step}" if hook == "after_step" else f"trial {event[0].number}"
                log.exception("observer %s.%s failed on %s and is switched off", type(observer).__name__, hook, where)
                self.remove(observer)


class TrialBook:
    """Numbers trials, reserves them, commits their results. Every environment owns one; no two runs share one.

    >>> trial = book.new_trial({"x": 1}, group=1)
    ... book.ledger.reserve([trial])
    ... trial = book.commit(trial, Result(Outcome.OK, {"y": 2.0}, reward=Reward(2.0)))
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        ledger: Ledger,
        *,
        budget: int | None = None,
        count_cached: bool = True,
        observers: Iterable[Observer] = (),
    ) -> None:
        self.name, self.directory, self.ledger = name, directory, ledger
        self.budget, self.count_cached = budget, count_cached
        self.observers = Observers(observers)
        self.step, self.group, self.draw = ledger.last()
        """The last trial number, group and draw of the run. A new group or draw is one more."""
        self.uncounted = 0 if count_cached else ledger.counts()["cached"]
        """How many trials so far do not use up budget."""
        self.history: list[Any] = []
        """The trials that its agent has read from the ledger to the end, if all had ended; a report continues there."""
        self.doubt: str | None = None
        """Why the run's result cannot be trusted, if its environment knows a reason."""
        self.when_ended: Callable[[], object] = lambda: None
        """Called once the agent has ended, before the result is read: a live environment writes its last steps."""
        self.stopping = False
        self.is_interruptible = True
        """Whether RunStopped may be raised in the agent's loop now."""
        self.kill: Callable[[], None] = lambda: None
        """Ends every process of the run at once; called from a signal handler."""
        self._on_stop: Callable[[], object] | None = None

    # -- numbers, reserve, commit -------------------------------------------------------------------------------

    def increment_step(self) -> int:
        """Advance the trial counter. Nothing else does, and only environments call it."""
        self.step += 1
        return self.step

    def new_trial(
        self,
        action: Action,
        *,
        group: int,
        repeat: int = 0,
        key: str = "",
        draw: int | None = None,
        regime: Regime | None = None,
        noise: Mapping[str, Any] | None = None,
        phase: Phase = "",
    ) -> Trial:
        """A trial with the next number. It is not in the ledger yet: reserve it before anything else happens to it."""
        number = self.increment_step()
        return Trial(
            number,
            action,
            key,
            group,
            repeat,
            draw,
            regime or {},
            reserved_at=time.time(),
            noise=noise or {},
            phase=phase,
        )

    def commit(self, trial: Trial, result: Result, *, hold: bool = True) -> Trial:
        """Write a trial's result to the ledger, notify the observers, and return the finished trial."""
        finished = self.ledger.commit(trial, result, hold=hold)
        if result.cached_from is not None and not self.count_cached:
            self.uncounted += 1
        if self.observers:
            self.observers.notify("after", finished)
        return finished

    def has_budget(self, trials: int = 1) -> bool:
        """Whether the budget allows this many more trials."""
        return self.budget is None or self.step - self.uncounted + trials <= self.budget

    # -- stopping -----------------------------------------------------------------------------------------------

    def when_stopped(self, callback: Callable[[], object] | None) -> None:
        """Set what to call, from a signal handler, when the run stops; it is called now if the run is stopping.

        It returns False if it does not end the agent's loop: RunStopped is then raised there.
        """
        self._on_stop = callback
        if self.stopping and callback is not None:
            callback()

    def stop(self) -> bool:
        """Stop the run early: trials in flight are aborted and no new one starts. Whether the agent's loop ends now."""
        self.stopping = True
        return self._on_stop is not None and self._on_stop() is not False

    async def until_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Await the work of an agent with its own event loop, cancelled when the run stops."""
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        self.when_stopped(lambda: loop.call_soon_threadsafe(task.cancel))
        try:
            await task
        except asyncio.CancelledError:
            if not self.stopping:
                raise
        finally:
            self.when_stopped(None)

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Around what has to be written as a whole, such as a checkpoint: a stop raises RunStopped only after it."""
        before, self.is_interruptible = self.is_interruptible, False
        try:
            yield
        finally:
            self.is_interruptible = before
