"""Failures that are all alike: a run that gives no result to trust ends early and says why."""

import logging

from pydantic import Field

from loopwright.core.config import Config
from loopwright.core.outcome import Outcome, without_numbers
from loopwright.core.trial import Trial
from loopwright.ledger.ledger import Ledger

log = logging.getLogger(__name__)

_DEFAULT = 20
FAILED = (Outcome.CRASHED, Outcome.TIMEOUT, Outcome.METRIC_MISSING)
"""The failures of a point. One that violates a constraint never ran, and one that was lost is not to blame."""


class FailConfig(Config):
    """When failures end a run."""

    same: int | None = Field(default=None, ge=1)
    """How many identical failures in a row end the run. By default 20, and only if no trial has succeeded."""


class FailureWatch:
    """Counts identical failures from `first`, the first one of this process.

    After a resume it continues counting from the ledger, but gives a halted run another chance.
    """

    def __init__(self, ledger: Ledger, same: int | None, first: Trial) -> None:
        self.verdict = ""
        """Why the run ends, once there were too many."""
        self._ledger, self._same, self._limit = ledger, same, same or _DEFAULT
        self._streak, self._last = 0, ""
        self._has_success = bool(ledger.counts().get(Outcome.OK))
        after = max(ledger.state("halted_at", 0), ledger.last()[0] - 2 * self._limit)
        for trial in ledger.trials(after=after):
            if trial.number != first.number:
                self._count(trial)

    def add(self, trial: Trial) -> None:
        """Add a trial that has ended."""
        self._count(trial)
        if self._streak < self._limit or (self._same is None and self._has_success) or self.verdict:
            return
        reason = trial.reason.rstrip(".") or "-"
        success = "" if self._has_success else " and none has succeeded"
        self.verdict = (
            f"stopped: the last {self._streak} trials failed alike{success}: {trial.outcome}: {reason}. "
            "Correct the workload and continue with `loopwright resume`, or set a higher `fail = { same = … }`."
        )
        self._ledger.set_state("halted_at", trial.number)
        self._ledger.set_state("failure", self.verdict)
        log.error("%s", self.verdict)

    def _count(self, trial: Trial) -> None:
        if trial.outcome is Outcome.OK:
            self._streak, self._has_success = 0, True
        elif trial.outcome in (*FAILED, Outcome.INVALID) and trial.cached_from is None:
            failure = f"{trial.outcome}: {without_numbers(trial.reason)}"
            self._streak = self._streak + 1 if failure == self._last else 1
            self._last = failure
