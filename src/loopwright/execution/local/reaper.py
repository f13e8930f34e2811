"""The reaper: a small process that outlives this one, if it is killed, for as long as it takes to clean up after it."""

import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

from loopwright.execution.local import processes
from loopwright.execution.local.spawn import ProcessLimits, StartedProcess, spawn
from loopwright.execution.sandbox.files import remove

# As a file and not by -m, and without any packages: it is there for good and should weigh next to nothing.
_COMMAND = (sys.executable, "-IS", str(Path(processes.__file__)))


class Reaper:
    """Whatever runs under a marker of its, and whatever lies in its directory, is gone soon after this process is.

    reaper = Reaper("judge")
    reaper.start()
    await executor.run(Command(..., directory=reaper.directory, marker=f"{reaper.marker}.1"), started)
    reaper.close()
    """

    def __init__(self, name: str) -> None:
        self.marker = f"{name}-{uuid.uuid4().hex}"
        self._name = name
        self._directory: Path | None = None
        self._spawned: StartedProcess | None = None

    @property
    def directory(self) -> Path:
        """A temporary directory, made when it is first asked for."""
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix=f"loopwright-{self._name}-"))
        return self._directory

    def start(self) -> None:
        """See to it that the reaper is there; LaunchError if it cannot be."""
        if self._spawned is not None and self._spawned.process.poll() is None:
            return
        self._end()
        own = os.getpid()
        self._spawned = spawn(
            [*_COMMAND, str(own), str(processes.start_ticks(own)), f"{self.marker}.", str(self.directory)],
            directory=Path("/"),
            environment={name: value for name, value in os.environ.items() if name == processes.MARKER_VARIABLE},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            limits=ProcessLimits(),
        )

    def close(self) -> None:
        """There is nothing more to keep."""
        self._end()
        if self._directory is not None:
            remove(self._directory)
            self._directory = None

    def _end(self) -> None:
        if self._spawned is not None:
            self._spawned.process.kill()
            self._spawned.process.wait()
            os.close(self._spawned.pidfd)
            self._spawned = None
