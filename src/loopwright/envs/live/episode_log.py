"""The episodes of a live run on their way to the ledger, and how many of them failed."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from loopwright.core.outcome import Fault, Outcome
from loopwright.core.trial import Regime
from loopwright.envs.live.server import ServerError
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.recorder import Recorder

Ending = tuple[Outcome, Fault | None, str]
"""How an episode ended: outcome, fault, reason."""
OK: Ending = (Outcome.OK, None, "")
Unfinished = tuple[tuple[Any, ...], dict[str, Any]]
"""The row and the facts of an episode."""
MAX_IN_A_ROW = 10
"""This many failed steps of each environment, without a good one between them, stop the run."""
_SHOWN, _MAX_REASONS = 3, 100
_REWARD_PARTS = '{"parts":{},"more":[]}'


@dataclass(frozen=True)
class LiveEpisode:
    """An episode, from its first step on."""

    first: int
    group: int
    draw: int | None
    regime: Regime
    regime_json: str
    began_at: float

    def summary(self, last: int, length: int, total: float, *, truncated: bool, complete: bool) -> dict[str, Any]:
        """What ledger and report store of it, after its `last` step. `complete` if the server ended it."""
        return {
            "episode": self.group,
            "first": self.first,
            "last": last,
            "return": total,
            "length": length,
            "regime": self.regime,
            "truncated": truncated,
            "complete": complete,
        }

    def row(self, summary: Mapping[str, Any], ending: Ending) -> tuple[Any, ...]:
        """Its row in the ledger with `record = "episodes"`."""
        reward = (summary["return"], _REWARD_PARTS) if ending is OK else (None, None)
        row = (summary["last"], self.group, "null", self.draw, self.regime_json, *ending, *reward)
        return *row, orjson.dumps(summary).decode(), self.began_at, time.time()


class EpisodeLog:
    """Passes ended episodes to the recorder, whose numbers must rise.

    With several slots (`hold`), an episode that ends waits for one more round of steps: until then another slot's
    episode may have a lower last number, and would have to be written first if the run stopped there.
    """

    def __init__(self, ledger: Ledger, in_progress: Callable[[], list[Unfinished]]) -> None:
        self.recorder = Recorder(ledger, unfinished=self._unfinished)
        self.hold = False
        self._in_progress = in_progress
        self._recent: list[tuple[int, dict[str, Any], tuple[Any, ...] | None]] = []
        self._waiting: list[tuple[int, dict[str, Any], tuple[Any, ...] | None]] = []

    def add(self, last: int, summary: dict[str, Any], row: tuple[Any, ...] | None) -> None:
        """Add an episode that ended with this trial, with its row if only episodes are recorded."""
        if self.hold:
            self._recent.append((last, summary, row))
        else:
            self._write(last, summary, row)

    def release(self) -> None:
        """Write the episodes that ended in the round before the one that has just ended."""
        if self._recent or self._waiting:
            waiting, self._waiting, self._recent = self._waiting, self._recent, []
            for episode in waiting:
                self._write(*episode)

    def close(self) -> None:
        """Write everything and close the recorder."""
        waiting, self._waiting, self._recent = sorted(self._waiting + self._recent, key=lambda one: one[0]), [], []
        for episode in waiting:
            self._write(*episode)
        self.recorder.close()

    def _write(self, last: int, summary: dict[str, Any], row: tuple[Any, ...] | None) -> None:
        if row is not None:
            self.recorder.add_row(row)
        self.recorder.add_episode(last, summary)

    def _unfinished(self) -> list[Unfinished]:
        recordable = [(row, summary) for _, summary, row in self._waiting + self._recent if row is not None]
        return recordable + self._in_progress()


class NoGoodStep(ServerError):
    """Every step fails: the message groups the reasons."""


class StepFailures:
    """Counts failed steps and ended episodes. A failed step ends its episode.

    A run stops early if its steps all fail, and does not succeed if most episodes did (S18).
    """

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
        reasons = "; ".join(f"{count} × {outcome}: {reason}" for (outcome, reason), count in most)
        more = len(self._reasons) - len(most)
        return f"{reasons}; and {more} other reasons" if more else reasons
