"""Observers: a user's own code before and after each trial, for logging, dashboards and notes."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from loopwright.core.trial import Trial
from loopwright.ledger.steps import Kind, Step

log = logging.getLogger(__name__)


class Observer:
    """Override any hook. The first two run for every trial: cached, infeasible, invalid and failed ones too."""

    def before(self, trial: Trial) -> None:
        """The trial has its number and its action, and is about to start."""

    def after(self, trial: Trial) -> None:
        """The trial has ended and is in the ledger."""

    def after_step(self, kind: Kind, step: Step) -> None:
        """A training has taken a step, or measured how good the policy is now, and it is in the ledger."""


class Observers:
    """All observers of a run. One that raises is switched off and said so: a broken logger must not end a night."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = list(observers)

    def __iter__(self) -> Iterator[Observer]:
        return iter(self._observers)

    def before(self, trial: Trial) -> None:
        """Tell all that a trial starts."""
        self._tell("before", f"trial {trial.number}", trial)

    def after(self, trial: Trial) -> None:
        """Tell all that a trial has ended."""
        self._tell("after", f"trial {trial.number}", trial)

    def after_step(self, kind: Kind, step: Step) -> None:
        """Tell all what a step of training came to."""
        self._tell("after_step", f"step {step.step}", kind, step)

    def _tell(self, hook: str, where: str, *news: Any) -> None:
        for observer in tuple(self._observers):
            try:
                getattr(observer, hook)(*news)
            except Exception:
                self._observers.remove(observer)
                name = f"{type(observer).__name__}.{hook}"
                log.exception("observer %s failed on %s and is off from now on", name, where)
