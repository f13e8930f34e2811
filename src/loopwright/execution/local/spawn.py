"""Starting a process in a session of its own, and knowing afterwards whether it can have left anything behind.

The kernel hands out process ids in order. If every id given out since a process started belongs to one that we
started ourselves, then it has no descendants, and the search through the process table can be skipped.
"""

import errno
import os
import resource
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from loopwright.core.errors import LaunchError, StorageError
from loopwright.core.signals import shield_children
from loopwright.execution.local.processes import start_ticks

_FASTEST_FORKS_PER_S = 200_000
_MANY = 1000
_INFRA = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_NO_ROOM = "The machine has no room for another process; lower `parallel`, or raise its limits (ulimit -u, -n, memory)."

# Re-entrant, since a signal handler that kills everything may interrupt a spawn in its own thread.
_lock = threading.RLock()
_spawned = 0


class PidSnapshot(NamedTuple):
    """A moment in the sequence of process ids. A tuple, since one is made for each trial."""

    pid: int
    spawned: int
    at_s: float


@dataclass(frozen=True)
class StartedProcess:
    """A process that has just been started; its pidfd is the caller's to close."""

    process: subprocess.Popen[bytes]
    start_ticks: int
    pidfd: int
    birth: PidSnapshot


@dataclass(frozen=True)
class ProcessLimits:
    """What a process may use."""

    cores: Collection[int] | None = None
    memory_bytes: int | None = None


def spawn(
    argv: Sequence[str],
    *,
    directory: Path,
    environment: Mapping[str, str],
    stdout: int,
    stderr: int,
    limits: ProcessLimits,
    pass_fds: Sequence[int] = (),
) -> StartedProcess:
    """Start a process, or raise LaunchError."""
    global _spawned
    shield_children()
    with _lock:
        # A child inherits the affinity of the thread that starts it, so it never runs elsewhere, not even for a moment.
        before = _pin(limits.cores) if limits.cores else None
        try:
            at_s = time.monotonic()
            process = subprocess.Popen(
                argv,
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        except (OSError, ValueError, IndexError) as error:
            raise _explain(argv, directory, error) from error
        finally:
            if before:
                os.sched_setaffinity(0, before)
        _spawned += 1
        birth = PidSnapshot(process.pid, _spawned, at_s)
    if limits.memory_bytes is not None:
        # DATA and not AS: Go, Java, CUDA and sanitizers reserve address space by the terabyte and touch little of it.
        with suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (limits.memory_bytes, limits.memory_bytes))
    try:
        # Never None: at the worst the process is a zombie of ours, which is still listed.
        return StartedProcess(process, start_ticks(process.pid) or 0, os.pidfd_open(process.pid), birth)
    except BaseException:
        process.kill()
        process.wait()
        raise


@contextmanager
def room() -> Iterator[None]:
    """Turn a lack of file descriptors, whatever they were wanted for, into a LaunchError."""
    try:
        yield
    except OSError as error:
        cause = error.__cause__ if isinstance(error, StorageError) else error
        if isinstance(cause, OSError) and cause.errno in _INFRA:
            raise LaunchError(f"cannot start a process: {cause.strerror}. {_NO_ROOM}", infra=True) from error
        raise


def now() -> PidSnapshot:
    """The present moment in the sequence of process ids."""
    with _lock:
        return PidSnapshot(_last_pid(), _spawned, time.monotonic())


def pids_since(since: PidSnapshot, present: PidSnapshot) -> Collection[int] | None:
    """The ids given out in between, none if all of them are known to be ours; None if they cannot be told."""
    born = present.pid - since.pid
    ids_may_have_wrapped = born < 0 or (present.at_s - since.at_s) * _FASTEST_FORKS_PER_S > _pid_max()
    if ids_may_have_wrapped or born > _MANY:
        return None
    if born == present.spawned - since.spawned:
        return ()
    return range(since.pid + 1, present.pid + 1)


def _pin(cores: Collection[int]) -> set[int]:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise LaunchError(
            f"cannot pin to cores {sorted(cores)}: {error.strerror}. "
            "They were taken from this process after it started; switch off CPU pinning, or start again.",
            infra=True,
        ) from error
    return before


def _explain(argv: Sequence[str], directory: Path, error: Exception) -> LaunchError:
    name = argv[0] if argv else ""
    where = f"cannot start {name!r} in {directory}"
    if not isinstance(error, OSError):
        reason = str(error) if argv else "the command is empty"
        return LaunchError(f"{where}: {reason}. Check the command and its arguments.")
    if error.errno in _INFRA:
        return LaunchError(
            f"{where}: {error.strerror}. {_NO_ROOM}",
            infra=True,
        )
    if not directory.is_dir():
        return LaunchError(
            f"{where}: the directory is not there. It was removed while the run was going on.", infra=True
        )
    if error.errno == errno.ENOENT:
        advice = (
            "Is the file there, and does the interpreter in its first line exist?"
            if "/" in name
            else "Install it, or give its path; it was looked up in the trial's PATH."
        )
        return LaunchError(f"{where}: not found. {advice}")
    if error.errno == errno.EACCES:
        return LaunchError(f"{where}: not executable. Run: chmod +x {name}")
    if error.errno == errno.ENOEXEC:
        return LaunchError(f"{where}: neither a program for this machine nor a script that begins with '#!'.")
    if error.errno == errno.E2BIG:
        return LaunchError(f"{where}: arguments and environment are too long. Hand large values over in a file.")
    return LaunchError(f"{where}: {error.strerror}. Check the command and its path.")


@cache
def _loadavg() -> int:
    # Kept open for good: reading it is on the path of each trial.
    return os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)


def _last_pid() -> int:
    line = os.pread(_loadavg(), 128, 0)
    return int(line[line.rfind(b" ") :])


@cache
def _pid_max() -> int:
    return int(Path("/proc/sys/kernel/pid_max").read_text())
