"""The reaper: a small process that cleans up after this one if it is killed."""

import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

from loopwright.execution.files import remove
from loopwright.execution.local import processes
from loopwright.execution.local.process_tree import ProcessLimits, ProcessTree, spawn

# As a file instead of -m, and with the standard library only, since it runs as long as we do.
_COMMAND = (sys.executable, "-IS", str(Path(processes.__file__)))


class Reaper:
    """Ends everything that runs under its marker, and deletes its directory, once this process is gone.

    reaper = Reaper("judge")
    reaper.start()
    await executor.run(Command(..., directory=reaper.directory, marker=f"{reaper.marker}.1"), on_start)
    reaper.close()
    """

    def __init__(self, name: str, *, detached: bool = False) -> None:
        """A `detached` one is not our child: Ray kills the children of a worker that it ends."""
        self._prefix = ("/bin/sh", "-c", '"$@" &', "sh") if detached else ()
        self.marker = f"{name}-{uuid.uuid4().hex}"
        self._name = name
        self._directory: Path | None = None
        self._started: ProcessTree | None = None

    @property
    def directory(self) -> Path:
        """A temporary directory, created on first use."""
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix=f"loopwright-{self._name}-"))
        return self._directory

    def start(self) -> None:
        """Start the process unless it is running; LaunchError if that fails."""
        if self._started is not None and self._started.process.poll() is None:
            return
        self._stop()
        own = os.getpid()
        self._started = spawn(
            [
                *self._prefix,
                *_COMMAND,
                str(own),
                str(processes.start_ticks(own)),
                f"{self.marker}.",
                str(self.directory),
            ],
            directory=Path("/"),
            environment={k: v for k, v in os.environ.items() if k == processes.MARKER_VARIABLE},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            limits=ProcessLimits(),
        )

    def close(self) -> None:
        """Stop the process and delete the directory."""
        self._stop()
        if self._directory is not None:
            remove(self._directory)
            self._directory = None

    def _stop(self) -> None:
        if self._started is not None:
            self._started.process.kill()
            self._started.process.wait()
            os.close(self._started.pidfd)
            self._started = None
