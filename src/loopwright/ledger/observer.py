"""Observers: a user's own code before and after each trial, for logging, dashboards and notes."""

import logging
from typing import Any

from loopwright.core.trial import Trial
from loopwright.ledger.steps import Kind, Step

log = logging.getLogger(__name__)


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

    def before(self, trial: Trial) -> None:
        """Call `before` on every observer."""
        self._notify("before", f"trial {trial.number}", trial)

    def after(self, trial: Trial) -> None:
        """Call `after` on every observer."""
        self._notify("after", f"trial {trial.number}", trial)

    def after_step(self, kind: Kind, step: Step) -> None:
        """Call `after_step` on every observer."""
        self._notify("after_step", f"step {step.step}", kind, step)

    def _notify(self, hook: str, subject: str, *arguments: Any) -> None:
        for observer in tuple(self):
            try:
                getattr(observer, hook)(*arguments)
            except Exception:
                self.remove(observer)
                name = f"{type(observer).__name__}.{hook}"
                log.exception("observer %s failed on %s and is switched off", name, subject)
