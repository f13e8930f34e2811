"""The batch script of an allocation: starts trials that the login node asks for, as steps of its job.

`python -m loopwright.execution.slurm.allocation_main BASE` looks into BASE.requests: NAME.json asks for a command,
NAME.cancel for its end. It outlives a killed Loopwright, whose trials continue, and ends when it has
long been idle.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_TICK_S = 0.1
_IDLE_S = 900.0


class Allocation:
    """The commands that run now, each under its own supervisor."""

    def __init__(self, base: Path) -> None:
        self._requests = base.with_name(f"{base.name}.requests")
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._busy_s = time.monotonic()
        self._stopping = False

    def serve(self) -> None:
        """Run what is asked for, until it is stopped, or has long been idle."""
        signal.signal(signal.SIGTERM, self._stop)
        while not self._stopping and time.monotonic() < self._busy_s + _IDLE_S:
            for request in sorted(self._requests.iterdir()):
                self._handle(request)
            self._collect()
            time.sleep(_TICK_S)
        for process in self._running.values():
            process.terminate()
        while self._running:
            self._collect()
            time.sleep(_TICK_S)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _handle(self, request: Path) -> None:
        name = request.stem
        base = self._requests.with_name(name)
        if request.suffix == ".json":
            request.rename(f"{base}.json")
            with Path(f"{base}.log").open("wb") as log:
                argv = [sys.executable, "-P", "-m", "loopwright.execution.slurm.job_main", str(base)]
                self._running[name] = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        elif request.suffix == ".cancel":
            request.unlink()
            if name in self._running:
                self._running[name].terminate()

    def _collect(self) -> None:
        for name, process in list(self._running.items()):
            self._busy_s = time.monotonic()
            if process.poll() is None:
                continue
            del self._running[name]
            done = self._requests.with_name(f"{name}.done")
            if not done.exists():
                spec = json.loads(self._requests.with_name(f"{name}.json").read_bytes())
                log = self._requests.with_name(f"{name}.log").read_text(errors="replace").strip().splitlines()
                reason = log[-1][:300] if log else f"exit code {process.returncode}"
                record = {"launch_error": f"the supervisor of a step ended: {reason}", "infra": True}
                part = done.with_suffix(".part")
                part.write_text(json.dumps(record | {"directory": spec["directory"]}))
                part.rename(done)


if __name__ == "__main__":
    os.environ.pop("SLURM_MEM_PER_NODE", None)  # steps would ask for all of it, one after another
    Allocation(Path(sys.argv[1])).serve()
