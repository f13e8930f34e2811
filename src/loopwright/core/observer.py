"""Observers: a user's own code before and after each trial, for logging, dashboards and notes."""

import logging
from collections.abc import Iterator, Sequence

from loopwright.core.trial import Trial

log = logging.getLogger(__name__)


class Observer:
    """Override either hook. Both run for every trial: cached, infeasible, invalid and failed ones too."""

    def before(self, trial: Trial) -> None:
        """The trial has its number and its action, and is about to start."""

    def after(self, trial: Trial) -> None:
        """The trial has ended and is in the ledger."""


class Observers:
    """All observers of a run. One that raises is switched off and said so: a broken logger must not end a night."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = list(observers)

    def __iter__(self) -> Iterator[Observer]:
        return iter(self._observers)

    def before(self, trial: Trial) -> None:
        """Tell all that a trial starts."""
        self._tell("before", trial)

    def after(self, trial: Trial) -> None:
        """Tell all that a trial has ended."""
        self._tell("after", trial)

    def _tell(self, hook: str, trial: Trial) -> None:
        for observer in tuple(self._observers):
            try:
                getattr(observer, hook)(trial)
            except Exception:
                self._observers.remove(observer)
                name = f"{type(observer).__name__}.{hook}"
                log.exception("observer %s failed on trial %d and is off from now on", name, trial.number)
