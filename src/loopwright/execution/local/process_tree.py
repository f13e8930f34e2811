"""A process with all its descendants: starting it in its own session, waiting for it, and ending all of it.

The kernel hands out process ids in order. If every id handed out since a process started belongs to a process that we
started ourselves, it has no descendants, and the search through the process table can be skipped.
"""

import asyncio
import errno
import logging
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from loopwright.core.errors import LaunchError, StorageError
from loopwright.execution.base import Usage
from loopwright.execution.local import processes
from loopwright.execution.local.processes import Process

_log = logging.getLogger(__name__)
_ROUNDS = 50
_KILL_TIMEOUT_S = 10.0
_MAX_FORKS_PER_S = 200_000
_MAX_CANDIDATES = 1000
_INHERITED = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM)
_EXHAUSTION = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_ADVICE = "The machine cannot run more processes; lower `parallel`, or raise its limits (ulimit -u, -n, memory)."

# Re-entrant, since a signal handler that kills everything may interrupt a spawn in the same thread.
_lock = threading.RLock()
_spawn_count = 0
_load_file = -1
"""A descriptor of /proc/loadavg, which stays open since it is read for each trial."""
_pid_max = 0


class PidSnapshot(NamedTuple):
    """A moment in the sequence of process ids. A tuple, since each trial creates one."""

    pid: int
    spawn_count: int
    at_s: float


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
    marker: str = "",
    pass_fds: Sequence[int] = (),
    stdin: int = subprocess.DEVNULL,
) -> "ProcessTree":
    """Start a process with default signal handling, or raise LaunchError."""
    global _spawn_count
    if threading.current_thread() is threading.main_thread():  # in others no handler can be set
        for number in _INHERITED:
            if signal.getsignal(number) is signal.SIG_IGN:  # which the process would inherit
                signal.signal(number, processes.ignore)
    with _lock:
        # A child inherits the affinity of the thread that starts it, so it never runs on another core.
        affinity = _pin(limits.cores) if limits.cores else None
        try:
            at_s = time.monotonic()
            process = subprocess.Popen(
                argv,
                cwd=directory,
                env=environment,
                stdin=stdin,
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
        entry = processes.read(process.pid)
        ticks = entry.start_ticks if entry else 0
        return ProcessTree(process.pid, ticks, process, os.pidfd_open(process.pid), snapshot, marker)
    except BaseException:
        process.kill()
        process.wait()
        raise


def exhaustion(error: OSError) -> LaunchError | None:
    """What to raise instead, if file descriptors, processes or memory have run out."""
    cause = error.__cause__ if isinstance(error, StorageError) else error
    if isinstance(cause, OSError) and cause.errno in _EXHAUSTION:
        return LaunchError(f"cannot start a process: {cause.strerror}. {_ADVICE}", infra=True)
    return None


def new_pids(start: PidSnapshot) -> tuple[PidSnapshot, Collection[int] | None]:
    """The current position in the sequence of process ids, and the ids handed out since `start`: empty if all of them
    are known to be ours, None if unknown.
    """
    global _load_file, _pid_max
    with _lock:
        if _load_file < 0:
            _pid_max = int(Path("/proc/sys/kernel/pid_max").read_text())
            _load_file = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
        line = os.pread(_load_file, 128, 0)
        end = PidSnapshot(int(line[line.rfind(b" ") :]), _spawn_count, time.monotonic())
    count = end.pid - start.pid
    may_have_wrapped = count < 0 or (end.at_s - start.at_s) * _MAX_FORKS_PER_S > _pid_max
    if may_have_wrapped or count > _MAX_CANDIDATES:
        return end, None
    return end, () if count == end.spawn_count - start.spawn_count else range(start.pid + 1, end.pid + 1)


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


@dataclass(frozen=True)
class Exit:
    """How the main process ended, and what it used."""

    exit_code: int | None
    signal: int | None
    usage: Usage


@dataclass(eq=False)
class ProcessTree:
    """The processes of one trial, as `spawn` started them.

    The main process stays unreaped until `reap`, so its id cannot be reused while we signal it.
    Apart from `wait`, no method is cut short by a cancellation: it sets `interrupted`, and the caller raises it.
    """

    pid: int
    start_ticks: int
    process: subprocess.Popen[bytes]
    """The main process."""
    pidfd: int
    """Closed by `reap`."""
    start: PidSnapshot
    marker: str
    is_alive: bool = True
    """Whether the main process is still running."""
    interrupted: bool = False
    _members: Sequence[int] = ()
    _killed_cpu_s: tuple[float, float] = (0.0, 0.0)
    _end_s: float | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _deadline_s: float | None = None
    _timer: asyncio.TimerHandle | None = None
    _waiter: asyncio.Future[None] | None = None

    def detach(self) -> None:
        """Stop watching. Safe to call twice, and after the loop was closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self.pidfd)
            self._loop = None

    async def wait(self, timeout_s: float | None) -> None:
        """Wait for the end of the main process, for the timeout, or for `wake`. May be cancelled."""
        if not self.is_alive:
            return
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self.detach()
            self._loop = loop
            loop.add_reader(self.pidfd, self._on_end)
        self._waiter = loop.create_future()
        if timeout_s is not None:
            self._deadline_s = loop.time() + timeout_s
            self._set_timer(loop)
        try:
            await self._waiter
        finally:
            self._deadline_s = None

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set a timer for the deadline. A pending earlier one is kept: that is cheaper than a timer per call."""
        if self._deadline_s is None:
            return
        if self._timer is not None:
            if self._timer.when() <= self._deadline_s:
                return
            self._timer.cancel()
        self._timer = loop.call_at(self._deadline_s, self._on_timer, loop)

    def _on_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._deadline_s is not None and loop.time() >= self._deadline_s:
            self.wake()
        else:
            self._set_timer(loop)

    def wake(self) -> None:
        """Make `wait` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _on_end(self) -> None:
        self._end_s, self.is_alive = time.monotonic(), False
        self.detach()
        self.wake()

    def kill(self) -> None:
        """SIGKILL the whole tree immediately, without waiting."""
        with self._open_members() as pidfds:
            self._kill(pidfds)

    async def end(self, grace_s: float) -> None:
        """SIGTERM the whole tree, SIGKILL the rest after `grace_s`, and wait until all of it is gone."""
        with self._open_members() as pidfds:
            # What is killed is waited for by nobody, and its time would be lost.
            self._killed_cpu_s = processes.cpu_s(self._members)
            for pidfd in pidfds:
                processes.send(pidfd, signal.SIGTERM)
            await self._wait_for(pidfds, grace_s)
            self._kill(pidfds)
        await self.kill_descendants(include_main=True)

    async def wait_for_exit(self, grace_s: float) -> None:
        """Give the main process time to exit by itself."""
        try:
            await self.wait(grace_s)
        except asyncio.CancelledError:
            self.interrupted = True

    async def kill_descendants(self, *, include_main: bool = False) -> None:
        """SIGKILL what the main process left behind, repeatedly until nothing is left."""
        for _ in range(_ROUNDS):
            with self._open_members(include_main=include_main) as pidfds:
                if not pidfds:
                    return
                self._kill(pidfds)
                if not await self._wait_for(pidfds, _KILL_TIMEOUT_S):
                    break
        _log.warning("process %d left processes that cannot be killed; they may disturb later trials", self.pid)

    def has_descendants(self, pids: Collection[int] | None) -> bool:
        """Whether a process that the main process started is still running; `pids` are the candidates, if known."""
        return bool(self._find(pids, include_main=False))

    def reap(self) -> Exit:
        """Collect the exit status and release the process."""
        self.detach()
        os.close(self.pidfd)
        # It is reaped here; otherwise Popen warns that it is still running.
        self.process.returncode = 0
        try:
            pid, status, used = os.wait4(self.pid, os.WNOHANG)
        except ChildProcessError as error:
            raise LaunchError(
                f"the exit status of process {self.pid} was lost: SIGCHLD is ignored, or other code waits for our "
                "child processes. Start Loopwright with SIGCHLD at its default.",
                infra=True,
            ) from error
        if pid == 0:
            raise LaunchError(
                f"process {self.pid} cannot be killed, not even by SIGKILL: it hangs in the kernel. "
                "Check for an unresponsive network disk or device.",
                infra=True,
            )
        code = os.waitstatus_to_exitcode(status)
        end_s = time.monotonic() if self._end_s is None else self._end_s
        user_s, system_s = map(max, (used.ru_utime, used.ru_stime), self._killed_cpu_s)
        usage = {"wall_s": end_s - self.start.at_s, "user_s": user_s, "system_s": system_s}
        if used.ru_maxrss > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss:
            usage["max_rss_bytes"] = used.ru_maxrss * 1024
        return Exit(code if code >= 0 else None, -code if code < 0 else None, usage)

    def _kill(self, pidfds: Collection[int]) -> None:
        # The process group too: that reaches what was forked since the snapshot was taken.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for pidfd in pidfds:
            processes.send(pidfd, signal.SIGKILL)

    def _find(self, candidates: Collection[int] | None, *, include_main: bool) -> list[Process]:
        if candidates is not None and include_main:
            candidates = [self.pid, *candidates]
        if candidates is not None and not candidates:
            return []
        members = processes.descendants([self.pid], [self.marker], pids=candidates, since_ticks=self.start_ticks)
        return [process for process in members if include_main or process.pid != self.pid]

    @contextmanager
    def _open_members(self, *, include_main: bool = True) -> Iterator[list[int]]:
        """Pidfds of the living processes of this tree: a snapshot, taken before any of them is signalled."""
        members: dict[int, Process] = {}
        try:
            for process in self._find(new_pids(self.start)[1], include_main=include_main):
                if (pidfd := processes.open_pidfd(process)) is not None:
                    members[pidfd] = process
            self._members = [process.pid for process in members.values()]
            yield list(members)
        finally:
            for pidfd, process in members.items():
                # The main process is left to `reap`, which also reads its usage.
                (os.close if process.pid == self.pid else processes.release)(pidfd)

    async def _wait_for(self, pidfds: Collection[int], timeout_s: float) -> bool:
        """Wait up to `timeout_s` until all of these have ended; shielded from cancellation."""
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[None] = loop.create_future()
        alive = set(pidfds)

        def on_end(pidfd: int) -> None:
            loop.remove_reader(pidfd)
            alive.discard(pidfd)
            if not alive:
                finish()

        def finish() -> None:
            if not finished.done():
                finished.set_result(None)

        for pidfd in pidfds:
            loop.add_reader(pidfd, on_end, pidfd)
        timer = loop.call_later(timeout_s, finish)
        try:
            while alive and not finished.done():
                try:
                    await asyncio.shield(finished)
                except asyncio.CancelledError:
                    self.interrupted = True
        finally:
            timer.cancel()
            for pidfd in alive:
                loop.remove_reader(pidfd)
        return not alive


def describe(exit_: Exit) -> str:
    """An exit in words: `exit code 3`, `signal 9 (SIGKILL)`."""
    return signal_name(exit_.signal) if exit_.signal is not None else f"exit code {exit_.exit_code}"


def signal_name(number: int) -> str:
    """A signal in words; real-time signals have no name."""
    with suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"
