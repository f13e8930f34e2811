"""Looking at a Python callable without calling it, in a process that is thrown away."""

import os
import socket
import subprocess
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from loopwright.execution.local.process_tree import signal_name
from loopwright.execution.local.processes import MARKER_VARIABLE, end_leftovers
from loopwright.execution.local.spawn import ProcessLimits, spawn
from loopwright.execution.local.worker_process import COMMAND

_DEADLINE_S = 30.0


@dataclass(frozen=True)
class CallableSignature:
    """What a callable takes, or why it cannot be called."""

    problem: str | None = None
    accepts: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    """Those of `accepts` that have no default."""
    any: bool = False
    """Whether it takes every keyword."""

    def refused(self, names: Iterable[str]) -> list[str]:
        """The arguments that it does not take."""
        return [] if self.any else [name for name in names if name not in self.accepts]

    def missing(self, names: Iterable[str]) -> list[str]:
        """The arguments that it needs besides these."""
        given = set(names)
        return [name for name in self.requires if name not in given]


def check(
    function: str, path: Sequence[Path], environment: Mapping[str, str], deadline_s: float = _DEADLINE_S
) -> CallableSignature:
    """Import the module of `module:callable` as a worker would, and say what the callable takes or what is wrong."""
    marker = f"check-{uuid.uuid4().hex}"
    ours, theirs = socket.socketpair()
    with ours, theirs, Path(os.devnull).open("wb") as nowhere:
        spawned = spawn(
            [*COMMAND, str(theirs.fileno())],
            directory=Path("/"),
            environment={**environment, MARKER_VARIABLE: f"{environment.get(MARKER_VARIABLE, '')}:{marker}"},
            stdout=nowhere.fileno(),
            stderr=nowhere.fileno(),
            limits=ProcessLimits(),
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        os.close(spawned.pidfd)
        process = spawned.process
        recorded = process.pid, spawned.start_ticks
        try:
            answer = _ask(ours, [{"path": [str(entry) for entry in path]}, {"check": function}], deadline_s)
            problem = answer.get("problem") if answer is not None else _death(function, process)
        except TimeoutError:
            answer, problem = None, f"importing the module of {function!r} takes longer than {deadline_s:g} s."
        finally:
            end_leftovers([recorded], marker)
            process.wait()
    if answer is None or problem is not None:
        return CallableSignature(problem=problem)
    return CallableSignature(None, tuple(answer["accepts"]), tuple(answer["requires"]), answer["any"])


def _death(function: str, process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return f"importing the module of {function!r} closed all files of its process."
    how = signal_name(-code) if code < 0 else f"exit code {code}"
    return f"importing the module of {function!r} ended the process: {how}."


def _ask(connection: socket.socket, frames: Iterable[dict[str, Any]], deadline_s: float) -> dict[str, Any] | None:
    """The answer, or None if the process hung up without one; TimeoutError if it does neither."""
    until_s = time.monotonic() + deadline_s
    data = b""
    try:
        for frame in frames:
            body = orjson.dumps(frame)
            connection.sendall(len(body).to_bytes(4, "big") + body)
        while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
            connection.settimeout(max(0.001, until_s - time.monotonic()))
            if not (chunk := connection.recv(65536)):
                return None
            data += chunk
    except (BrokenPipeError, ConnectionResetError):
        return None
    answer: dict[str, Any] = orjson.loads(data[4:])
    return answer
