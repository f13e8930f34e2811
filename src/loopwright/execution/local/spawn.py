"""Starts processes in their own session, and tells whether a process can have left descendants.

The kernel hands out process ids in order. If every id handed out since a process started belongs to a process that we
started ourselves, it has no descendants, and the search through the process table can be skipped.
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

_MAX_FORKS_PER_S = 200_000
_MAX_CANDIDATES = 1000
_EXHAUSTION = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_ADVICE = "The machine cannot run more processes; lower `parallel`, or raise its limits (ulimit -u, -n, memory)."

# Re-entrant, since a signal handler that kills everything may interrupt a spawn in the same thread.
_lock = threading.RLock()
_spawn_count = 0


class PidSnapshot(NamedTuple):
    """A moment in the sequence of process ids. A tuple, since each trial creates one."""

    pid: int
    spawn_count: int
    at_s: float


@dataclass(frozen=True)
class StartedProcess:
    """A process that was just started. The caller closes its pidfd."""

    process: subprocess.Popen[bytes]
    start_ticks: int
    pidfd: int
    snapshot: PidSnapshot


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
    """Start a process with default signal handling, or raise LaunchError."""
    global _spawn_count
    shield_children()
    with _lock:
        # A child inherits the affinity of the thread that starts it, so it never runs on another core.
        affinity = _pin(limits.cores) if limits.cores else None
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
            raise _launch_error(argv, directory, error) from error
        finally:
            if affinity:
                os.sched_setaffinity(0, affinity)
        _spawn_count += 1
        snapshot = PidSnapshot(process.pid, _spawn_count, at_s)
    if limits.memory_bytes is not None:
        # DATA and not AS: Go, Java, CUDA and sanitizers reserve terabytes of address space and touch little of it.
        with suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (limits.memory_bytes, limits.memory_bytes))
    try:
        # Never None: at worst the process is our zombie, which is still listed.
        return StartedProcess(process, start_ticks(process.pid) or 0, os.pidfd_open(process.pid), snapshot)
    except BaseException:
        process.kill()
        process.wait()
        raise


@contextmanager
def exhaustion_as_launch_error() -> Iterator[None]:
    """Raise LaunchError where file descriptors, processes or memory run out."""
    try:
        yield
    except OSError as error:
        cause = error.__cause__ if isinstance(error, StorageError) else error
        if isinstance(cause, OSError) and cause.errno in _EXHAUSTION:
            raise LaunchError(f"cannot start a process: {cause.strerror}. {_ADVICE}", infra=True) from error
        raise


def pid_snapshot() -> PidSnapshot:
    """The current position in the sequence of process ids."""
    with _lock:
        line = os.pread(_loadavg_fd(), 128, 0)
        return PidSnapshot(int(line[line.rfind(b" ") :]), _spawn_count, time.monotonic())


def pids_between(start: PidSnapshot, end: PidSnapshot) -> Collection[int] | None:
    """The process ids handed out in between; empty if all of them are known to be ours, None if unknown."""
    count = end.pid - start.pid
    may_have_wrapped = count < 0 or (end.at_s - start.at_s) * _MAX_FORKS_PER_S > _pid_max()
    if may_have_wrapped or count > _MAX_CANDIDATES:
        return None
    if count == end.spawn_count - start.spawn_count:
        return ()
    return range(start.pid + 1, end.pid + 1)


def _pin(cores: Collection[int]) -> set[int]:
    affinity = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise LaunchError(
            f"cannot pin to cores {sorted(cores)}: {error.strerror}. "
            "They were taken from this process after it started; switch off CPU pinning, or start again.",
            infra=True,
        ) from error
    return affinity


def _launch_error(argv: Sequence[str], directory: Path, error: Exception) -> LaunchError:
    name = argv[0] if argv else ""
    prefix = f"cannot start {name!r} in {directory}"
    if not isinstance(error, OSError):
        reason = str(error) if argv else "the command is empty"
        return LaunchError(f"{prefix}: {reason}. Check the command and its arguments.")
    if error.errno in _EXHAUSTION:
        return LaunchError(f"{prefix}: {error.strerror}. {_ADVICE}", infra=True)
    if not directory.is_dir():
        return LaunchError(f"{prefix}: the directory does not exist. It was removed during the run.", infra=True)
    if error.errno == errno.ENOENT:
        advice = (
            "Check that the file exists, and the interpreter named in its first line."
            if "/" in name
            else "Install it, or give its path; it was looked up in the trial's PATH."
        )
        return LaunchError(f"{prefix}: not found. {advice}")
    if error.errno == errno.EACCES:
        return LaunchError(f"{prefix}: not executable. Run: chmod +x {name}")
    if error.errno == errno.ENOEXEC:
        return LaunchError(f"{prefix}: neither a program for this machine nor a script that begins with '#!'.")
    if error.errno == errno.E2BIG:
        return LaunchError(f"{prefix}: arguments and environment are too long. Pass large values in a file.")
    return LaunchError(f"{prefix}: {error.strerror}. Check the command and its path.")


@cache
def _loadavg_fd() -> int:
    # Stays open: it is read for each trial.
    return os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)


@cache
def _pid_max() -> int:
    return int(Path("/proc/sys/kernel/pid_max").read_text())
