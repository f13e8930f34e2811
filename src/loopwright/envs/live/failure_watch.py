"""The failures of a live run: it stops early if its steps all fail, and is no success if most episodes did (S18)."""

from collections import Counter

from loopwright.core.outcome import Outcome
from loopwright.envs.live.server import ServerError

MAX_IN_A_ROW = 10
"""So many failed steps of each environment without a good one between them stop the run."""
_SHOWN, _MAX_REASONS = 3, 100


class NoGoodStep(ServerError):
    """Every step fails: the message groups the reasons."""


class FailureWatch:
    """Counts failed steps and ended episodes. A failed step ends its episode."""

    def __init__(self) -> None:
        self.episodes = 0
        self._failed, self._in_a_row, self._last = 0, 0, 0
        self._reasons: Counter[tuple[Outcome, str]] = Counter()

    def add(self, number: int, outcome: Outcome, reason: str, slots: int) -> None:
        """Count a failed step. Raises NoGoodStep after too many with consecutive numbers.

        Not counted: what the policy causes (it may learn), and what a stop causes.
        """
        if outcome in (Outcome.INVALID, Outcome.ABORTED):
            return
        self._failed += 1
        self._in_a_row = self._in_a_row + 1 if number == self._last + 1 else 1
        self._last = number
        if len(self._reasons) < _MAX_REASONS or (outcome, reason) in self._reasons:
            self._reasons[outcome, reason] += 1
        if self._in_a_row >= MAX_IN_A_ROW * slots:
            raise NoGoodStep(f"{self._in_a_row} steps in a row failed, so the run was stopped: {self._grouped()}")

    @property
    def doubt(self) -> str | None:
        """Why the run's result cannot be trusted."""
        if self._failed * 2 <= self.episodes:
            return None
        return f"{self._failed} of {self.episodes} episodes ended with a failed step: {self._grouped()}"

    def _grouped(self) -> str:
        most = self._reasons.most_common(_SHOWN)
        listed = "; ".join(f"{count} × {outcome}: {reason}" for (outcome, reason), count in most)
        more = len(self._reasons) - len(most)
        return f"{listed}; and {more} other reasons" if more else listed
