"""Engine time: how long a session could do nothing but wait for its engine, which is never the policy's fault."""

from collections.abc import Callable

MAX_SLOWDOWN = 10
"""A rollout that needs more engine time than this many deadlines is given up, and counts as lost."""


class EngineWait:
    """The time in which turns were sampled or queued, and no tool or command ran on the policy's behalf.

    Concurrent turns count once, so nobody gains time by asking twice.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        """When the current wait began, on the event loop's clock; None if the session does not wait."""
        self.on_change: Callable[[], None] | None = None
        """Called when a wait begins or ends."""
        self._turns = self._tasks = 0
        self._total_s = 0.0

    def total_s(self, now: float) -> float:
        """Seconds so far, including the current wait."""
        return self._total_s + (0.0 if self.since is None else now - self.since)

    def enter(self, phase: str, now: float) -> None:
        """Start a phase: `generate` waits for the engine, every other is work of the policy's choice."""
        self._count(phase, 1, now)

    def leave(self, phase: str, now: float) -> None:
        """End a phase."""
        self._count(phase, -1, now)

    def _count(self, phase: str, change: int, now: float) -> None:
        if phase == "generate":
            self._turns += change
        else:
            self._tasks += change
        is_waiting = self._turns > 0 and not self._tasks
        if is_waiting is (self.since is not None):
            return
        self._total_s = self.total_s(now)
        self.since = now if is_waiting else None
        if self.on_change is not None:
            self.on_change()
