"""Measures what the processes of a sandbox use together, several times a second, and ends those that use too much.

The kernel's own limits apply to each process separately, and the number of processes is not limited for root at all.
Where there is a control group, the kernel enforces memory and processes, and the monitor only ends what is left.
"""

import asyncio
import logging
import os
import signal
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from loopwright.execution.files import run_in_thread
from loopwright.execution.local.processes import all_pids, send
from loopwright.execution.sandbox.base import Bounds
from loopwright.execution.sandbox.cgroup import Cgroup
from loopwright.execution.sandbox.disk import POLL_S, Disk

_log = logging.getLogger(__name__)
_RETRY_S = 2.0
"""Seconds until the next measurement after one that failed."""
OWN_PROCESSES = 4
"""Processes of a sandbox besides those of its command: two shells, and bubblewrap, which briefly is two."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class ResourceUsage:
    """What the processes of a sandbox use at one moment."""

    pids: list[int] = field(default_factory=list)
    cpu_s: float = 0.0
    memory_bytes: int = 0

    def exceeds(self, bounds: Bounds) -> str | None:
        """The first bound that is exceeded, in words."""
        if bounds.processes is not None and len(self.pids) > bounds.processes + OWN_PROCESSES:
            return f"processes: more than {bounds.processes} at a time"
        if bounds.memory_bytes is not None and self.memory_bytes > bounds.memory_bytes:
            return f"memory: {self.memory_bytes} bytes of {bounds.memory_bytes}"
        if bounds.cpu_s is not None and self.cpu_s > bounds.cpu_s:
            return f"CPU: {self.cpu_s:.1f} s of {bounds.cpu_s:g}"
        return None


@dataclass(eq=False)
class MonitoredSandbox:
    """One sandbox under supervision."""

    net: int
    """Its network namespace."""
    bounds: Bounds
    disk: Disk
    """What it can write to."""
    on_exceeded: Callable[[str], None]
    cgroup: Cgroup = field(default_factory=lambda: Cgroup({}))
    pids: list[int] = field(default_factory=list)
    """Its processes at the last measurement."""
    _kills_baseline: int = 0

    def begin_verification(self) -> None:
        """Exclude what is on the disk now, and processes that were ended until now."""
        self.disk.begin_verification()
        self._kills_baseline = self.cgroup.kills()

    def exceeded(self, usage: "ResourceUsage") -> str | None:
        """The first bound that is exceeded, in words, other than the disk's."""
        is_exact = self.cgroup.limits("memory")
        bounds = replace(self.bounds, memory_bytes=None) if is_exact else self.bounds
        return self.exceeded_memory() or usage.exceeds(bounds)

    def exceeded_memory(self) -> str | None:
        """Whether the kernel has ended a process because the memory of all of them is used up, in words."""
        if self.cgroup.kills() <= self._kills_baseline:
            return None
        return f"memory: all of {self.bounds.memory_bytes} bytes"


class ResourceMonitor:
    """Supervises the instances of a sandbox, all with one scan of the process table."""

    def __init__(self) -> None:
        self._sandboxes: set[MonitoredSandbox] = set()
        self._disk_tasks: dict[MonitoredSandbox, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, sandbox: MonitoredSandbox) -> None:
        """Start supervising this sandbox."""
        if sandbox.bounds == Bounds():
            return
        self._sandboxes.add(sandbox)
        if self._task is None or self._task.done() or self._task.get_loop().is_closed():
            self._task = asyncio.ensure_future(
                _repeat(lambda: asyncio.to_thread(end_excess, tuple(self._sandboxes))),
            )
        if sandbox.bounds.disk_bytes is not None:
            # Separately, since it may take long, and the others must be supervised meanwhile.
            self._disk_tasks[sandbox] = asyncio.ensure_future(_repeat(lambda: _check_disk(sandbox)))

    async def remove(self, sandbox: MonitoredSandbox) -> None:
        """Stop supervising it."""
        self._sandboxes.discard(sandbox)
        tasks = [self._disk_tasks.pop(sandbox)] if sandbox in self._disk_tasks else []
        if not self._sandboxes and self._task is not None:
            tasks.append(self._task)
            self._task = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _check_disk(sandbox: MonitoredSandbox) -> None:
    if reason := await run_in_thread(sandbox.disk.exceeded, sandbox.pids):
        await asyncio.to_thread(end_sandbox, sandbox, reason)


async def _repeat(measure: Callable[[], Awaitable[None]]) -> None:
    """Measure again and again, also after a failure."""
    pause_s = POLL_S
    while True:
        await asyncio.sleep(pause_s)
        pause_s = POLL_S
        try:
            await measure()
        except Exception as error:  # noqa: BLE001  The bounds depend on this, whatever the error is.
            pause_s = _RETRY_S
            _log.warning("the bounds of sandboxes are not enforced for %g s: %r", pause_s, error)


def end_excess(sandboxes: tuple[MonitoredSandbox, ...]) -> None:
    """End the processes of sandboxes that exceed a bound other than the disk's."""
    usages = usage_by_net()
    for sandbox in sandboxes:
        usage = usages.get(sandbox.net, ResourceUsage())
        sandbox.pids = usage.pids
        if usage.pids and (reason := sandbox.exceeded(usage)):
            end_sandbox(sandbox, reason, usages)


def end_sandbox(sandbox: MonitoredSandbox, reason: str, usages: Mapping[int, ResourceUsage] | None = None) -> None:
    """End the processes of a sandbox that exceeded a bound, if there are any."""
    usage = (usage_by_net() if usages is None else usages).get(sandbox.net)
    if usage is not None:
        # First, since the code that waits for the processes reads the reason.
        sandbox.on_exceeded(reason)
        kill(sandbox.net, usage.pids)


def kill(net: int, pids: list[int]) -> None:
    """SIGKILL processes in this namespace. They include its process 1, whose end ends all others."""
    for pid in pids:
        with suppress(OSError):
            pidfd = os.pidfd_open(pid)
            try:
                # Checked with the pidfd open, since the id may have been reused before.
                if _net(pid) == net:
                    send(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)


def usage_by_net() -> dict[int, ResourceUsage]:
    """The usage of each network namespace that we can read."""
    own = _net(os.getpid())
    usages: dict[int, ResourceUsage] = defaultdict(ResourceUsage)
    for pid in all_pids():
        with suppress(OSError, ValueError, IndexError):
            if (net := _net(pid)) != own:
                usage = usages[net]
                usage.pids.append(pid)
                text = Path(f"/proc/{pid}/stat").read_bytes()
                # Its own time and that of children it waited for; living children are counted themselves.
                usage.cpu_s += sum(map(int, text[text.rfind(b")") + 2 :].split()[11:15])) / _TICKS_PER_S
                # Without file pages, which all processes of a program share.
                for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
                    if line.startswith((b"RssAnon", b"RssShmem")):
                        usage.memory_bytes += int(line.split()[1]) * 1024
    return usages


def _net(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/net").st_ino  # noqa: PTH116  Path.stat costs twice as much.
