"""The process table: which processes belong to a trial, and ending those that a killed Loopwright left behind.

A process belongs to a trial if it is in the trial's session or process group, if its environment carries the trial's
marker (this finds daemons that left the session), or if its parent belongs to the trial.

Under `nohup` and in a script's background jobs, some signals are ignored from the start. They stay ignored here, but
the processes that Loopwright starts get the default handling: a trial that is sent SIGINT ends, however Loopwright was
started.

Also run as a script by `reaper.py`, so it imports nothing but the standard library.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

MARKER_VARIABLE = "LOOPWRIGHT_TRIAL"
"""Holds `:marker` for each trial a process runs under: several if a trial itself runs Loopwright."""

_WAIT_S = 10.0
_ROUNDS = 100
_START_UP_S = 0.1
"""Time until a process that is being started shows its marker."""
_PREFIX = f"{MARKER_VARIABLE}=".encode()


@dataclass(frozen=True)
class Process:
    """An entry of the process table. Pid and start time together identify it uniquely."""

    pid: int
    parent: int
    group: int
    session: int
    start_ticks: int
    zombie: bool


def read(pid: int) -> Process | None:
    """The process with this id, or None."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123  Path.open costs twice as much.
            text = file.read(1024)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The program name may contain spaces and parentheses, so fields are counted from the last parenthesis.
    fields = text[text.rfind(b")") + 2 :].split(None, 20)
    if len(fields) < 20:
        return None
    return Process(pid, int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]), fields[0] in b"ZX")


def cpu_s(pids: Iterable[int]) -> tuple[float, float]:
    """User and system time of these processes and of the children that they waited for."""
    user = system = 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            text = Path(f"/proc/{pid}/stat").read_bytes()
            fields = text[text.rfind(b")") + 2 :].split()
            user += int(fields[11]) + int(fields[13])
            system += int(fields[12]) + int(fields[14])
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    return user * tick_s, system * tick_s


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it does not exist."""
    process = read(pid)
    return process.start_ticks if process else None


def all_pids() -> list[int]:
    """All process ids in this namespace."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208  Only the names are needed.


def has_marker(pid: int, marker: str, *, prefix: bool = False) -> bool:
    """Whether the process was started with `marker` in its environment, or with a marker that begins with it."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    # Terminated by a colon, since the marker of trial 12 begins with that of trial 1.
    pattern = b":" + os.fsencode(marker) + (b"" if prefix else b":")
    entries = (entry for entry in environment.split(b"\0") if entry.startswith(_PREFIX))
    return any(pattern in entry[len(_PREFIX) :] + b":" for entry in entries)


def descendants(
    roots: Collection[int],
    markers: Collection[str],
    *,
    pids: Iterable[int] | None = None,
    since_ticks: int = 0,
    prefix: bool = False,
) -> list[Process]:
    """The living processes of the trials with these root pids or markers, including the roots: parents first.

    `pids` restricts the search to these candidates; `since_ticks` excludes processes older than the trial.
    """
    table = {
        process.pid: process
        for pid in (all_pids() if pids is None else pids)
        if (process := read(pid)) and process.start_ticks >= since_ticks
    }
    markers = [marker for marker in markers if marker]
    protected = _own_ancestry()
    members = {
        pid
        for pid, process in table.items()
        if pid not in protected
        and (
            pid in roots
            or process.session in roots
            or process.group in roots
            or any(has_marker(pid, marker, prefix=prefix) for marker in markers)
        )
    }
    while children := {
        pid
        for pid, process in table.items()
        if process.parent in members and pid not in members and pid not in protected
    }:
        members |= children
    # A listing of /proc has processes only, but candidate ids may be those of threads.
    living = [table[pid] for pid in members if not table[pid].zombie and (pids is None or _is_process(pid))]
    # A shell whose child is signalled first would continue with its next command.
    return sorted(living, key=lambda process: (process.start_ticks, process.pid))


def _is_process(pid: int) -> bool:
    try:
        os.close(os.pidfd_open(pid))
    except OSError:
        return False
    return True


def _own_ancestry() -> set[int]:
    """This process and its ancestors: a Loopwright that runs inside a trial must not end itself."""
    ancestry: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in ancestry:
        ancestry.add(pid)
        process = read(pid)
        pid = process.parent if process else 0
    return ancestry


def open_pidfd(process: Process) -> int | None:
    """A pidfd of exactly this process; None if it is gone, even if another process has its id."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        return None
    if start_ticks(process.pid) == process.start_ticks:
        return pidfd
    os.close(pidfd)
    return None


def send(pidfd: int, number: int) -> None:
    """Signal a process, unless it is gone or belongs to another user."""
    with suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(pidfd, number)


def release(pidfd: int) -> None:
    """Close a pidfd, and reap its process if it is our child: process 1 of a container inherits all orphans."""
    with suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    os.close(pidfd)


def ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike SIG_IGN, a handler is not inherited: executing a program resets it to the default."""


IGNORED = (signal.SIG_IGN, ignore)
"""The handlers of a signal that this process was started with as ignored, and should keep ignoring."""


def end_leftovers(handles: Iterable[str], marker: str) -> int:
    """End what a killed Loopwright left running; return the number of processes.

    This covers the trees of all handles, `pid:start time`, that are still the same process, and every process whose
    marker begins with `marker`. Returns when they are gone, or after ten seconds.
    """
    records = [(int(pid), int(ticks)) for pid, _, ticks in (handle.partition(":") for handle in handles)]
    # Compare start times first: a recycled pid also names the session of its new process.
    same = [(pid, ticks) for pid, ticks in records if start_ticks(pid) == ticks]
    killed: set[tuple[int, int]] = set()
    deadline = time.monotonic() + _WAIT_S
    for _ in range(_ROUNDS):
        # Repeated, since a process may have forked meanwhile. A root that is gone still names its session.
        roots = {pid for pid, ticks in same if start_ticks(pid) in (ticks, None)}
        members = descendants(roots, [marker], prefix=True)
        if not members or time.monotonic() > deadline:
            break
        pidfds = {pidfd: process for process in members if (pidfd := open_pidfd(process)) is not None}
        try:
            for pidfd in pidfds:
                send(pidfd, signal.SIGKILL)
            alive = _wait(pidfds, deadline)
        finally:
            for pidfd in pidfds:
                release(pidfd)
        killed |= {(process.pid, process.start_ticks) for pidfd, process in pidfds.items() if pidfd not in alive}
    return len(killed)


def _wait(pidfds: Iterable[int], deadline: float) -> set[int]:
    """Wait for processes to end; return those that have not."""
    poller = select.poll()
    waiting = set(pidfds)
    for pidfd in waiting:
        poller.register(pidfd, select.POLLIN)
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for pidfd, _ in poller.poll(left_s * 1000):
            poller.unregister(pidfd)
            waiting.discard(pidfd)
    return waiting


def clean_up_after(pid: int, ticks: int, marker: str, directory: str) -> None:
    """Wait until a process ends; then end what it left running under this marker, and delete its directory."""
    process = read(pid)
    if process is not None and process.start_ticks == ticks and (pidfd := open_pidfd(process)) is not None:
        select.select([pidfd], [], [])
        os.close(pidfd)
    time.sleep(_START_UP_S)
    end_leftovers((), marker)
    for line in Path("/proc/self/mounts").read_text().splitlines():
        if (mount := line.split()[1]).startswith(f"{directory}/"):  # the disk of a sandbox
            os.spawnvp(os.P_WAIT, "umount", ["umount", "--lazy", mount])  # noqa: S606
    # Like execution.files, which cannot be imported here: also deletes read-only and deeply nested directories.
    for argv in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        os.spawnvp(os.P_WAIT, argv[0], [*argv, "--", directory])  # noqa: S606  No shell is needed.


if __name__ == "__main__":
    clean_up_after(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
