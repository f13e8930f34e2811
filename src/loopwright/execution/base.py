"""The executor interface: a command goes in, and how its process ended comes out.

An executor knows nothing about trials, metrics or outcomes. It guarantees that a process is recorded before anything
else happens to it, and that nothing it started is alive once `run` has returned or raised.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from loopwright.core.progress import Reporter

OnStart = Callable[[str], object]
"""Called with a handle by which a resumed run finds the command again: as soon as its process exists, or before its job
is submitted."""


Usage = Mapping[str, float]
"""What a process used, including the children it waited for: `wall_s`, `user_s`, `system_s`, and `max_rss_bytes` if
that can be measured. The kernel starts a child's peak at the memory of its parent, so a peak below our own is unknown,
and a Python worker's peak may stem from an earlier call."""


@dataclass(frozen=True, eq=False)
class Slot:
    """One of the places where trials run at the same time, with what no other trial has meanwhile."""

    number: int
    cores: frozenset[int] | None = None
    """The cores that its processes are pinned to; None if they are not."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What a command may name: `{slot}`, `{cpus}`, `{gpu}`, `{port}`, `{port_2}` …"""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The same for the environment of its processes."""


class SlotPool(Protocol):
    """Where a trial that consists of several commands gets one slot for all of them."""

    async def acquire(self) -> Slot:
        """Wait for a slot and take it."""

    def with_free_ports(self, slot: Slot) -> Slot:
        """The same slot, with other ports if something else uses one of its ports by now."""

    def release(self, slot: Slot) -> None:
        """Give the slot to the next trial."""


@dataclass(frozen=True)
class Command:
    """What to run, and where its output goes."""

    argv: tuple[str, ...]
    directory: Path
    """The working directory, which must exist."""
    environment: Mapping[str, str]
    """The complete environment."""
    stdout: Path
    stderr: Path
    timeout_s: float | None = None
    marker: str = ""
    """Unique per attempt. It identifies processes that left the command's session."""
    slot: Slot | None = None
    """A slot that the caller holds; by default the executor takes one for as long as the command runs."""
    handle: str = ""
    """The handle of a job that an earlier process submitted for this command; the executor continues with that job."""
    nodes: int = 1
    gpus: int = 0
    """GPUs per node."""
    once: bool = False
    """Whether it is started once, on the first of its nodes, whatever the system does with others."""
    measures_memory: bool = False
    """Whether `max_rss_bytes` is needed also for a small program. Locally, this costs a shell and an interpreter."""


@dataclass(frozen=True)
class Completion:
    """How a process ended. Exactly one of `exit_code` and `signal` is set."""

    exit_code: int | None
    signal: int | None
    timed_out: bool
    usage: Usage
    stdout_bytes: int
    """Bytes produced, including those that exceeded the cap and were not written to the file."""
    stderr_bytes: int
    reason: str = ""
    """Why it ended, if a scheduler says more than the exit code."""


@dataclass(frozen=True)
class FunctionCall:
    """One call of a Python function in a worker process, in a trial's directory."""

    function: str
    """`module:callable`."""
    path: tuple[Path, ...]
    """Put at the front of `sys.path`."""
    arguments: Mapping[str, Any]
    """JSON values."""
    environment: Mapping[str, str]
    """The worker's complete environment."""
    directory: Path
    """The working directory during the call. The worker creates it, with parameters.json; it stays if anything else is
    written to it, or to stdout or stderr."""
    parameters: bytes
    """The content of parameters.json."""
    timeout_s: float | None = None
    """Starts once the module is imported; the import may take a minute, or this if it is longer."""
    marker: str = ""
    """Unique per attempt. It identifies processes that left the worker's session."""
    handle: str = ""
    nodes: int = 1
    gpus: int = 0
    """As those of a command."""
    checkpoint: Path | None = None
    """In LOOPWRIGHT_CHECKPOINT during the call, if there is one."""
    on_report: Reporter | None = None
    """Called with what the function reports; the call is stopped if it returns True."""


@dataclass(frozen=True)
class CallResult:
    """How a call ended: a value, an error, a timeout, or the death of its worker. Only a value is a success."""

    usage: Usage
    stdout_bytes: int
    stderr_bytes: int
    value: Mapping[str, int | float] | None = None
    error: str | None = None
    """The traceback, which is also in the trial's stderr."""
    timed_out: bool = False
    stopped: bool = False
    """Whether `on_report` stopped the call."""
    worker_exit: str | None = None
    """How the worker ended during the call: `signal 9 (SIGKILL)`, `exit code 3`."""


class Executor(ABC):
    """Runs commands.

        class ContainerExecutor(Executor):
            async def run(self, command: Command, on_start: OnStart) -> Completion: ...
            def kill_all(self) -> None: ...

    Test a subclass with `loopwright.testing.ExecutorContract`.
    """

    slots: SlotPool | None = None
    """The slots of this machine; None if commands run elsewhere, where services and ports cannot be offered."""

    @abstractmethod
    async def run(self, command: Command, on_start: OnStart) -> Completion:
        """Run `command` until it ends. If cancelled, end the whole process tree first.

        Raises LaunchError if the command cannot be started, StorageError if its output cannot be written.
        """

    @abstractmethod
    def kill_all(self) -> None:
        """SIGKILL all running process trees immediately; safe in a signal handler. Their `run` calls then return."""

    async def close(self) -> None:
        """Release all resources. Nothing may be run afterwards."""
        self.kill_all()


class CallExecutor(ABC):
    """Runs calls of Python functions, each in a process that can be killed."""

    @abstractmethod
    async def call(self, call: FunctionCall, on_start: OnStart) -> CallResult:
        """Make a call. If cancelled, end its process first.

        Raises LaunchError if no process can be started, StorageError if output cannot be written.
        """

    @abstractmethod
    def kill_all(self) -> None:
        """SIGKILL all running calls immediately; safe in a signal handler."""

    @abstractmethod
    async def close(self) -> None:
        """Release all resources."""
