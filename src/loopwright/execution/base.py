"""The executor seam: a command goes in, what became of its process comes out.

An executor knows nothing of trials, metrics or outcomes. It promises that the process was recorded before anything
else happened to it, and that nothing it started is alive once `run` has returned or raised.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

OnStart = Callable[[int, int], None]
"""Told the process id and its start time (clock ticks since boot), as soon as the process exists."""


@dataclass(frozen=True)
class Usage:
    """What a process used, its waited-for children included."""

    wall_s: float
    user_s: float
    system_s: float
    max_rss_bytes: int | None = None
    """The peak memory, where it is known: the kernel counts a process with the memory of the one that starts it, so a
    peak below our own cannot be told, and a Python worker's peak may stem from an earlier call."""

    def known(self) -> dict[str, float]:
        """What was measured, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Command:
    """What to run, and where its output goes."""

    argv: tuple[str, ...]
    directory: Path
    """The working directory; it exists already."""
    environment: Mapping[str, str]
    """The complete environment."""
    stdout: Path
    stderr: Path
    timeout_s: float | None = None
    marker: str = ""
    """Unique per attempt; by it a process that forked away is found again."""


@dataclass(frozen=True)
class Completion:
    """How a process ended. Of `exit_code` and `signal` exactly one is set."""

    exit_code: int | None
    signal: int | None
    timed_out: bool
    usage: Usage
    stdout_bytes: int
    """As many as were produced, also those that the cap left out of the file."""
    stderr_bytes: int


class Executor(ABC):
    """Runs commands.

        class Remote(Executor):
            async def run(self, command: Command, on_start: OnStart) -> Completion: ...
            def kill_all(self) -> None: ...

    Subclass `loopwright.testing.executors.ExecutorContract` to test one.
    """

    @abstractmethod
    async def run(self, command: Command, on_start: OnStart) -> Completion:
        """Run `command` to its end; when cancelled, end the whole process tree first.

        Raises LaunchError if it cannot be on_start, StorageError if its output cannot be kept.
        """

    @abstractmethod
    def kill_all(self) -> None:
        """SIGKILL every tree in flight, at once; callable from a signal handler. The runs then complete."""

    async def close(self) -> None:
        """Release what is held. Nothing may be run afterwards."""
        self.kill_all()
