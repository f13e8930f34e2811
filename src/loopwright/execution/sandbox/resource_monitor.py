"""The watch: what the processes of a room use together, looked up again and again, and an end to what uses too much.

The kernel's own limits count each process by itself, and do not count root's processes at all.
"""

import asyncio
import logging
import os
import signal
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from loopwright.execution.local.processes import all_pids, send
from loopwright.execution.sandbox.base import Bounds
from loopwright.execution.sandbox.files import run_in_thread, size_bytes

_log = logging.getLogger(__name__)
POLL_S = 0.2
_FAILED_S = 2.0
"""Seconds until the next look, after one that failed."""
OWN_PROCESSES = 4
"""What a room has besides those of its command: two shells, and bubblewrap, which for a moment is two."""
_DISK_SHARE = 0.05
"""How much of the time may go into measuring a room's disk."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class ResourceUsage:
    """What the processes of a room use at one moment."""

    pids: list[int] = field(default_factory=list)
    cpu_s: float = 0.0
    memory_bytes: int = 0

    def exceeds(self, bounds: Bounds) -> str | None:
        """The first bound that is broken, in words."""
        if bounds.processes is not None and len(self.pids) > bounds.processes + OWN_PROCESSES:
            return f"processes: more than {bounds.processes} at a time"
        if bounds.memory_bytes is not None and self.memory_bytes > bounds.memory_bytes:
            return f"memory: {self.memory_bytes} bytes of {bounds.memory_bytes}"
        if bounds.cpu_s is not None and self.cpu_s > bounds.cpu_s:
            return f"CPU: {self.cpu_s:.1f} s of {bounds.cpu_s:g}"
        return None


@dataclass(eq=False)
class MonitoredSandbox:
    """One room under watch."""

    net: int
    bounds: Bounds
    places: tuple[Path, ...]
    exceeded: Callable[[str], None]
    next_disk_s: float = 0.0
    spared_bytes: int | None = 0
    """What does not count against its disk bound; None where it could not be measured, so that nothing does."""

    def spare(self) -> None:
        """Let what is there now not count."""
        self.spared_bytes = 0 if self.bounds.disk_bytes is None else size_bytes(*self.places)

    def disk(self) -> str | None:
        """Whether its files have become too many; measured rarely if that takes long."""
        limit = self.bounds.disk_bytes
        start_s = time.monotonic()
        if limit is None or start_s < self.next_disk_s:
            return None
        size = size_bytes(*self.places)
        now_s = time.monotonic()
        self.next_disk_s = now_s + max(POLL_S, (now_s - start_s) / _DISK_SHARE)
        # Looked at only now: it may be the agent's files that were measured, while its tests have begun.
        if (spared := self.spared_bytes) is None:
            return None
        if size is None:
            return "disk: a directory that may not be looked into, or files without end: it cannot be measured"
        return f"disk: {size - spared} bytes of {limit}" if size - spared > limit else None


class ResourceMonitor:
    """Looks after the rooms of a sandbox, all with one look at the process table."""

    def __init__(self) -> None:
        self._rooms: set[MonitoredSandbox] = set()
        self._disks: dict[MonitoredSandbox, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, room: MonitoredSandbox) -> None:
        """Look after this room."""
        if room.bounds == Bounds():
            return
        self._rooms.add(room)
        if self._task is None or self._task.done() or self._task.get_loop().is_closed():
            self._task = asyncio.ensure_future(_again(self._look))
        if room.bounds.disk_bytes is not None:
            self._disks[room] = asyncio.ensure_future(_again(partial(self._measure, room)))

    async def drop(self, room: MonitoredSandbox) -> None:
        """Look after it no more."""
        self._rooms.discard(room)
        tasks = [self._disks.pop(room)] if room in self._disks else []
        if not self._rooms and self._task is not None:
            tasks.append(self._task)
            self._task = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        await asyncio.to_thread(end_excess, tuple(self._rooms))

    async def _measure(self, room: MonitoredSandbox) -> None:
        """By itself, for it may take long: the others are not to go without their look meanwhile."""
        if reason := await run_in_thread(MonitoredSandbox.disk, room):
            await asyncio.to_thread(end_room, room, reason)


async def _again(look: Callable[[], Awaitable[None]]) -> None:
    """Look again and again; a look that fails is not the last one."""
    pause_s = POLL_S
    while True:
        await asyncio.sleep(pause_s)
        pause_s = POLL_S
        try:
            await look()
        except Exception as error:  # noqa: BLE001  whatever it is, the bounds of rooms hang on this
            pause_s = _FAILED_S
            _log.warning("the bounds of rooms cannot be looked after for %g s: %r", pause_s, error)


def end_excess(rooms: tuple[MonitoredSandbox, ...]) -> None:
    """End what is in the rooms that broke a bound, but for that of the disk."""
    used = usage()
    for room in rooms:
        if room.net in used and (reason := used[room.net].exceeds(room.bounds)):
            end_room(room, reason, used)


def end_room(room: MonitoredSandbox, reason: str, used: Mapping[int, ResourceUsage] | None = None) -> None:
    """End what is in a room that broke a bound, if anything is."""
    now = (usage() if used is None else used).get(room.net)
    if now is not None:
        # First, for whoever waits for the end wants to know the reason.
        room.exceeded(reason)
        end(room.net, now.pids)


def end(net: int, pids: list[int]) -> None:
    """SIGKILL those that are in this namespace; among them is the first of their process ids, with which all end."""
    for pid in pids:
        with suppress(OSError):
            # Looked up again once it is held, for its id may have been given to another.
            held = os.pidfd_open(pid)
            try:
                if _net(pid) == net:
                    send(held, signal.SIGKILL)
            finally:
                os.close(held)


def usage() -> dict[int, ResourceUsage]:
    """What is used in each network namespace that we may look into."""
    own = _net(os.getpid())
    found: dict[int, ResourceUsage] = defaultdict(ResourceUsage)
    for pid in all_pids():
        with suppress(OSError, ValueError, IndexError):
            if (net := _net(pid)) != own:
                used = found[net]
                used.pids.append(pid)
                used.cpu_s += _cpu_s(pid)
                used.memory_bytes += _memory_bytes(pid)
    return found


def _net(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/net").st_ino  # noqa: PTH116  Path.stat costs twice as much.


def _cpu_s(pid: int) -> float:
    text = Path(f"/proc/{pid}/stat").read_bytes()
    # Its own and that of children it waited for; those that live are counted by themselves.
    return sum(map(int, text[text.rfind(b")") + 2 :].split()[11:15])) / _TICKS_PER_S


def _memory_bytes(pid: int) -> int:
    """What is its own: not the pages of files, which all processes of a program share."""
    lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith((b"RssAnon", b"RssShmem")))
