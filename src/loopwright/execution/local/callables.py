"""Inspects a Python callable without calling it, in a separate process."""

import json
import os
import subprocess
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loopwright.execution.local.process_tree import ProcessLimits, signal_name, spawn
from loopwright.execution.local.processes import MARKER_VARIABLE, end_leftovers
from loopwright.execution.local.worker_process import COMMAND

_DEADLINE_S = 30.0


@dataclass(frozen=True)
class CallableSignature:
    """The keyword arguments of a callable, or why it cannot be called."""

    problem: str | None = None
    accepts: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    """Those of `accepts` without a default."""
    accepts_any: bool = False
    """Whether it takes arbitrary keywords."""

    def unknown(self, names: Iterable[str]) -> list[str]:
        """The arguments it does not take."""
        return [] if self.accepts_any else [name for name in names if name not in self.accepts]

    def missing(self, names: Iterable[str]) -> list[str]:
        """The arguments it requires besides these."""
        names = set(names)
        return [name for name in self.requires if name not in names]


def inspect_callable(
    function: str, path: Sequence[Path], environment: Mapping[str, str], deadline_s: float = _DEADLINE_S
) -> CallableSignature:
    """Import the module of `module:callable` as a worker would, and read the callable's signature."""
    marker = f"check-{uuid.uuid4().hex}"
    response: dict[str, Any] = {}
    with TemporaryDirectory(prefix="loopwright-check-") as folder, Path(os.devnull).open("wb") as devnull:
        question, answer = Path(folder, "question"), Path(folder, "answer")
        question.write_text(json.dumps({"path": [str(entry) for entry in path], "describe": function}))
        started = spawn(
            [*COMMAND, str(question), str(answer)],
            directory=Path("/"),
            environment={**environment, MARKER_VARIABLE: f"{environment.get(MARKER_VARIABLE, '')}:{marker}"},
            stdout=devnull.fileno(),
            stderr=devnull.fileno(),
            limits=ProcessLimits(),
        )
        os.close(started.pidfd)
        process = started.process
        try:
            code = process.wait(deadline_s)
            ending = signal_name(-code) if code < 0 else f"exit code {code}"
            response = {"problem": f"importing the module of {function!r} ended the process: {ending}."}
            if answer.exists():
                response = json.loads(answer.read_bytes())
        except subprocess.TimeoutExpired:
            response = {"problem": f"importing the module of {function!r} takes longer than {deadline_s:g} s."}
        finally:
            end_leftovers([f"{process.pid}:{started.start_ticks}"], marker)
            process.wait()
    if "problem" in response:
        return CallableSignature(problem=response["problem"])
    return CallableSignature(None, tuple(response["accepts"]), tuple(response["requires"]), response["any"])
