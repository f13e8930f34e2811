"""A call of a Python function as a trial, and what came back."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopwright.execution.base import Usage


@dataclass(frozen=True)
class FunctionCall:
    """One call of a function, in a trial's directory."""

    function: str
    """`module:callable`."""
    path: tuple[Path, ...]
    """Put at the front of `sys.path`."""
    arguments: Mapping[str, Any]
    """JSON values."""
    environment: Mapping[str, str]
    """The worker's complete environment."""
    directory: Path
    """Made by the worker, with parameters.json, stdout and stderr; the working directory during the call."""
    parameters: bytes
    """The content of parameters.json."""
    timeout_s: float | None = None
    """Counts from when the module has been imported; importing has a minute, or this if it is more."""
    marker: str = ""
    """Unique per attempt; by it a process that forked away is found again."""


@dataclass(frozen=True)
class CallResult:
    """What became of a call: a value, an error, a timeout or a death. Only a value is a good end."""

    usage: Usage
    stdout_bytes: int
    stderr_bytes: int
    value: Mapping[str, int | float] | None = None
    error: str | None = None
    """The traceback, which also stands in the trial's stderr."""
    timed_out: bool = False
    died: str | None = None
    """How the worker ended in the middle of the call: `signal 9 (SIGKILL)`, `exit code 3`."""
