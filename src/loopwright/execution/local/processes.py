"""The process table: which processes belong to a trial, and ending those that a dead Loopwright left behind.

A process belongs to a trial if it is in the trial's session or process group, if its environment carries the trial's
marker (this finds daemons that left the session), or if its parent belongs to it.
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

MARKER_VARIABLE = "LOOPWRIGHT_TRIAL"
"""Holds `:marker` for each trial that a process runs under: several if a trial runs a Loopwright of its own."""

_WAIT_S = 10.0
_ROUNDS = 100
_BIRTH_S = 0.1
"""How long it takes at most until a process that is being started shows its marker."""
_PREFIX = f"{MARKER_VARIABLE}=".encode()


@dataclass(frozen=True)
class Process:
    """A line of the process table; its pid and start time together name it for ever."""

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
    # The name may contain spaces and brackets, so the fields count from the last bracket.
    fields = text[text.rfind(b")") + 2 :].split(None, 20)
    if len(fields) < 20:
        return None
    return Process(pid, int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]), fields[0] in b"ZX")


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is no such process."""
    process = read(pid)
    return process.start_ticks if process else None


def all_pids() -> list[int]:
    """Every process id in this namespace."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208  Only the names are needed.


def marked(pid: int, marker: str, *, prefix: bool = False) -> bool:
    """Whether the environment that the process was started with names `marker`, or one that begins with it."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    wanted = b":" + os.fsencode(marker) + (b"" if prefix else b":")
    return any(
        # Closed by a colon, for trial 1's marker is the beginning of trial 12's.
        entry.startswith(_PREFIX) and wanted in entry[len(_PREFIX) :] + b":"
        for entry in environment.split(b"\0")
    )


def descendants(
    roots: Collection[int],
    markers: Collection[str],
    *,
    pids: Iterable[int] | None = None,
    since_ticks: int = 0,
    prefix: bool = False,
) -> list[Process]:
    """The living processes of the trials with these root pids or markers, roots included.

    `pids` narrows the search to those that can be meant; `since_ticks` leaves out whatever is older than the trial.
    """
    table = {
        process.pid: process
        for pid in (all_pids() if pids is None else pids)
        if (process := read(pid)) and process.start_ticks >= since_ticks
    }
    markers = [marker for marker in markers if marker]
    spared = _own_line()
    found = {
        pid
        for pid, process in table.items()
        if pid not in spared
        and (
            pid in roots
            or process.session in roots
            or process.group in roots
            or any(marked(pid, marker, prefix=prefix) for marker in markers)
        )
    }
    while young := {
        pid for pid, process in table.items() if process.parent in found and pid not in found and pid not in spared
    }:
        found |= young
    # A listing of /proc has processes only, but ids that are asked for one by one may be those of threads.
    return [table[pid] for pid in found if not table[pid].zombie and (pids is None or _leads(pid))]


def _leads(pid: int) -> bool:
    try:
        os.close(os.pidfd_open(pid))
    except OSError:
        return False
    return True


def _own_line() -> set[int]:
    """This process and its ancestors: a Loopwright that runs inside a trial must not end itself."""
    line: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in line:
        line.add(pid)
        process = read(pid)
        pid = process.parent if process else 0
    return line


def open_same(process: Process) -> int | None:
    """A pidfd of exactly this process; None if it is gone, even if its id has been given to another."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        return None
    if start_ticks(process.pid) == process.start_ticks:
        return pidfd
    os.close(pidfd)
    return None


def send(pidfd: int, number: int) -> None:
    """Signal a process; one that is gone already is fine, as is one that belongs to somebody else."""
    with suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(pidfd, number)


def release(pidfd: int) -> None:
    """Close a pidfd, and reap its process if it has become ours: process 1 of a container inherits all orphans."""
    with suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    os.close(pidfd)


def end_leftovers(recorded: Iterable[tuple[int, int]], marker: str) -> int:
    """End what a killed Loopwright left running; return how many processes were ended.

    Meant are the `recorded` (pid, start time) that are still the same process, with their whole trees, and every
    process whose marker begins with `marker`. Returns when they are gone, or after ten seconds.
    """
    # The start time is compared first: a pid that was given to another process also lends it its session's number.
    same = [(pid, ticks) for pid, ticks in recorded if start_ticks(pid) == ticks]
    ended: set[tuple[int, int]] = set()
    deadline = time.monotonic() + _WAIT_S
    for _ in range(_ROUNDS):
        # Again, for something may have been forked since; a root that is gone still names its session.
        roots = {pid for pid, ticks in same if start_ticks(pid) in (ticks, None)}
        found = descendants(roots, [marker], prefix=True)
        if not found or time.monotonic() > deadline:
            break
        pidfds = {pidfd: process for process in found if (pidfd := open_same(process)) is not None}
        try:
            for pidfd in pidfds:
                send(pidfd, signal.SIGKILL)
            alive = _wait(pidfds, deadline)
        finally:
            for pidfd in pidfds:
                release(pidfd)
        ended |= {(process.pid, process.start_ticks) for pidfd, process in pidfds.items() if pidfd not in alive}
    return len(ended)


def _wait(pidfds: Iterable[int], deadline: float) -> set[int]:
    """Wait for these to end; return those that have not."""
    poller = select.poll()
    waiting = set(pidfds)
    for pidfd in waiting:
        poller.register(pidfd, select.POLLIN)
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for pidfd, _ in poller.poll(left_s * 1000):
            poller.unregister(pidfd)
            waiting.discard(pidfd)
    return waiting


def outlive(pid: int, ticks: int, marker: str, directory: str) -> None:
    """Wait for the end of a process; then end what it left running under this marker, and delete its directory."""
    process = read(pid)
    if process is not None and process.start_ticks == ticks and (pidfd := open_same(process)) is not None:
        select.select([pidfd], [], [])
        os.close(pidfd)
    time.sleep(_BIRTH_S)
    end_leftovers((), marker)
    # As sandbox.files does it, which cannot be imported here: also what forbids it, and what lies thousands deep.
    for argv in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        os.spawnvp(os.P_WAIT, argv[0], [*argv, "--", directory])  # noqa: S606  No shell is wanted.


if __name__ == "__main__":  # see reaper.py
    outlive(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
