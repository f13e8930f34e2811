"""The episodes of a live run on their way to the ledger, in the order of their last trials."""

from collections.abc import Callable
from typing import Any

from loopwright.ledger.ledger import Ledger
from loopwright.ledger.recorder import Recorder

Unfinished = tuple[tuple[Any, ...], dict[str, Any]]
"""The row and the facts of an episode."""


class EpisodeLog:
    """Passes ended episodes to the recorder, whose numbers must rise.

    With several slots (`hold`), an episode that ends waits for one more round of steps: until then another slot's
    episode may have a lower last number, and would have to be written first if the run stopped there.
    """

    def __init__(self, ledger: Ledger, in_progress: Callable[[], list[Unfinished]]) -> None:
        self.recorder = Recorder(ledger, unfinished=self._unfinished)
        self.hold = False
        self._in_progress = in_progress
        self._ended: list[tuple[int, dict[str, Any], tuple[Any, ...] | None]] = []
        self._waiting: list[tuple[int, dict[str, Any], tuple[Any, ...] | None]] = []

    def add(self, last: int, summary: dict[str, Any], row: tuple[Any, ...] | None) -> None:
        """Add an episode that ended with this trial, with its row if only episodes are recorded."""
        if self.hold:
            self._ended.append((last, summary, row))
        else:
            self._write(last, summary, row)

    def release(self) -> None:
        """Write the episodes that ended in the round before the one that has just ended."""
        if self._ended or self._waiting:
            waiting, self._waiting, self._ended = self._waiting, self._ended, []
            for episode in waiting:
                self._write(*episode)

    def close(self) -> None:
        """Write everything and close the recorder."""
        waiting, self._waiting, self._ended = sorted(self._waiting + self._ended, key=lambda one: one[0]), [], []
        for episode in waiting:
            self._write(*episode)
        self.recorder.close()

    def _write(self, last: int, summary: dict[str, Any], row: tuple[Any, ...] | None) -> None:
        if row is not None:
            self.recorder.add_row(row)
        self.recorder.add_episode(last, summary)

    def _unfinished(self) -> list[Unfinished]:
        held = [(row, summary) for _, summary, row in self._waiting + self._ended if row is not None]
        return held + self._in_progress()
