"""A run: one entry of a scenario at work. It owns its directory, its ledger and the trial counter."""

from collections.abc import Callable
from pathlib import Path

from loopwright.ledger.ledger import Ledger


class RunStopped(Exception):
    """The run was told to stop; ends a learner's own loop. Trials in flight are recorded as `aborted`."""


class Run:
    """One agent over one environment. Several runs of a scenario never share a counter."""

    def __init__(self, name: str, directory: Path, ledger: Ledger) -> None:
        self.name, self.directory, self.ledger = name, directory, ledger
        self.step, self.group, self.draw = ledger.last()
        self.stopping = False
        self._trials = directory / "trials"
        self._wake: Callable[[], object] | None = None

    def increment_step(self) -> int:
        """Advance the trial counter: the one place where that happens, and only an environment calls it."""
        self.step += 1
        return self.step

    def trial_directory(self, number: int) -> Path:
        """Where a trial keeps its output."""
        return self._trials / str(number)

    def when_stopped(self, wake: Callable[[], object] | None) -> None:
        """Whom to wake when the run is told to stop; must be callable from a signal handler."""
        self._wake = wake
        if self.stopping and wake is not None:
            wake()

    def stop(self) -> None:
        """End the run early: trials in flight are aborted and no new one starts."""
        self.stopping = True
        if self._wake is not None:
            self._wake()
