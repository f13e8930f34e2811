"""Inspects a Python callable without calling it, in a separate process."""

import marshal
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
    ours, theirs = socket.socketpair()
    with ours, theirs, Path(os.devnull).open("wb") as devnull:
        started = spawn(
            [*COMMAND, str(theirs.fileno())],
            directory=Path("/"),
            environment={**environment, MARKER_VARIABLE: f"{environment.get(MARKER_VARIABLE, '')}:{marker}"},
            stdout=devnull.fileno(),
            stderr=devnull.fileno(),
            limits=ProcessLimits(),
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        os.close(started.pidfd)
        process = started.process
        try:
            response = _request(ours, [{"path": [str(entry) for entry in path]}, {"check": function}], deadline_s)
            problem = response.get("problem") if response is not None else _death(function, process)
        except TimeoutError:
            response, problem = None, f"importing the module of {function!r} takes longer than {deadline_s:g} s."
        finally:
            end_leftovers([f"{process.pid}:{started.start_ticks}"], marker)
            process.wait()
    if response is None or problem is not None:
        return CallableSignature(problem=problem)
    return CallableSignature(None, tuple(response["accepts"]), tuple(response["requires"]), response["any"])


def _death(function: str, process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return f"importing the module of {function!r} closed all files of its process."
    reason = signal_name(-code) if code < 0 else f"exit code {code}"
    return f"importing the module of {function!r} ended the process: {reason}."


def _request(connection: socket.socket, frames: Iterable[dict[str, Any]], deadline_s: float) -> dict[str, Any] | None:
    """The response, or None if the process disconnects without one; TimeoutError after the deadline."""
    end_s = time.monotonic() + deadline_s
    data = b""
    try:
        for frame in frames:
            body = marshal.dumps(frame)
            connection.sendall(len(body).to_bytes(4, "big") + body)
        while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
            connection.settimeout(max(0.001, end_s - time.monotonic()))
            if not (chunk := connection.recv(65536)):
                return None
            data += chunk
    except (BrokenPipeError, ConnectionResetError):
        return None
    response: dict[str, Any] = marshal.loads(data[4:])  # noqa: S302  Our own worker wrote it.
    return response
