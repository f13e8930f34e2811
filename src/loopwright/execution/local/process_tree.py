"""A process that we started and everything that descends from it: waiting for it, and ending all of it."""

import asyncio
import logging
import os
import resource
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from loopwright.core.errors import LaunchError
from loopwright.execution.base import Usage
from loopwright.execution.local import processes
from loopwright.execution.local.processes import Process
from loopwright.execution.local.spawn import PidSnapshot, StartedProcess, now, pids_since

_log = logging.getLogger(__name__)
_ROUNDS = 50
_KILLED_WITHIN_S = 10.0


@dataclass(frozen=True)
class Exit:
    """How the main process ended, and what it used."""

    exit_code: int | None
    signal: int | None
    usage: Usage


class ProcessTree:
    """The processes of one trial.

    The main process stays unreaped until `reap`, so its id cannot be given to another while we signal by it.
    No method is cut short by a cancellation; it is noted in `interrupted`, and the caller passes it on.
    """

    def __init__(self, spawned: StartedProcess, marker: str) -> None:
        self.pid = spawned.process.pid
        self.start_ticks = spawned.start_ticks
        self.interrupted = False
        self._process = spawned.process
        self._pidfd = spawned.pidfd
        self._birth = spawned.birth
        self._marker = marker
        self._ended_s: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadline_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether the main process has ended."""
        return self._ended_s is not None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take notice of the main process's end."""
        self.detach()
        if not self.ended:
            self._loop = loop
            loop.add_reader(self._pidfd, self._on_end)

    def detach(self) -> None:
        """Take no more notice. Safe to call twice, and after the loop was closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._pidfd)
            self._loop = None

    async def wait(self, timeout_s: float | None) -> None:
        """Wait for the end of the main process, for the timeout, or for `wake`; `ended` tells. May be cancelled."""
        if self._ended_s is not None:
            return
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        if timeout_s is not None:
            self._deadline_s = loop.time() + timeout_s
            self._arm(loop)
        try:
            await self._waiter
        finally:
            self._deadline_s = None

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        """See to the deadline, if there is one. A timer that rings too early may: it is cheaper than one per call."""
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
            self._arm(loop)

    def wake(self) -> None:
        """Let `wait` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _on_end(self) -> None:
        self._ended_s = time.monotonic()
        self.detach()
        self.wake()

    def kill(self) -> None:
        """SIGKILL the whole tree at once, without waiting."""
        with self._members() as members:
            self._kill(members)

    async def end(self, grace_s: float) -> None:
        """SIGTERM the whole tree, SIGKILL what is left of it `grace_s` later, and wait until all of it is gone."""
        with self._members() as members:
            for pidfd in members:
                processes.send(pidfd, signal.SIGTERM)
            await self._gone(members, grace_s)
            self._kill(members)
        await self.sweep(main=True)

    async def dismiss(self, grace_s: float) -> None:
        """Give the main process time to end by itself, then end all of it."""
        try:
            await self.wait(grace_s)
        except asyncio.CancelledError:
            self.interrupted = True
        await self.end(0.0)

    def alone(self) -> bool:
        """Whether the main process certainly left nothing behind."""
        return pids_since(self._birth, now()) == ()

    async def sweep(self, *, main: bool = False) -> None:
        """SIGKILL whatever the main process left behind (and itself), again until nothing is left."""
        for _ in range(_ROUNDS):
            with self._members(main=main) as members:
                if not members:
                    return
                self._kill(members)
                if not await self._gone(members, _KILLED_WITHIN_S):
                    break
        _log.warning("process %d left processes behind that cannot be ended; they may disturb later trials", self.pid)

    def leftovers(self, since: PidSnapshot, present: PidSnapshot) -> list[Process]:
        """What the main process started in between and left running."""
        return self._find(pids_since(since, present), main=False)

    def reap(self) -> Exit:
        """Take the exit status, and let go of the process."""
        self.detach()
        os.close(self._pidfd)
        # It is waited for here; else Popen warns that it still runs.
        self._process.returncode = 0
        try:
            pid, status, used = os.wait4(self.pid, os.WNOHANG)
        except ChildProcessError as error:
            raise LaunchError(
                f"the exit status of process {self.pid} was lost: SIGCHLD is ignored, or somebody else waits for our "
                "children. Start Loopwright with SIGCHLD at its default.",
                infra=True,
            ) from error
        if pid == 0:
            raise LaunchError(
                f"process {self.pid} cannot be ended, not even by SIGKILL; it hangs in the kernel. "
                "Look for a dead network disk or device.",
                infra=True,
            )
        code = os.waitstatus_to_exitcode(status)
        return Exit(code if code >= 0 else None, -code if code < 0 else None, self._usage(used))

    def _kill(self, members: Collection[int]) -> None:
        # The group as a whole too: that also reaches what was forked since the snapshot was taken.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for pidfd in members:
            processes.send(pidfd, signal.SIGKILL)

    def _usage(self, used: resource.struct_rusage) -> Usage:
        ended_s = self._ended_s if self._ended_s is not None else time.monotonic()
        ours = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = used.ru_maxrss * 1024 if used.ru_maxrss > ours else None
        return Usage(ended_s - self._birth.at_s, used.ru_utime, used.ru_stime, peak)

    def _find(self, pids: Collection[int] | None, *, main: bool) -> list[Process]:
        if pids is not None and main:
            pids = [self.pid, *pids]
        if pids is not None and not pids:
            return []
        found = processes.descendants([self.pid], [self._marker], pids=pids, since_ticks=self.start_ticks)
        return [process for process in found if main or process.pid != self.pid]

    @contextmanager
    def _members(self, *, main: bool = True) -> Iterator[list[int]]:
        """Pidfds of the living processes of this tree: a snapshot, taken before any of them is signalled."""
        opened: dict[int, Process] = {}
        try:
            for process in self._find(pids_since(self._birth, now()), main=main):
                if (pidfd := processes.open_same(process)) is not None:
                    opened[pidfd] = process
            yield list(opened)
        finally:
            for pidfd, process in opened.items():
                # The main process is left for `reap`, which also takes its usage.
                (os.close if process.pid == self.pid else processes.release)(pidfd)

    async def _gone(self, pidfds: Collection[int], timeout_s: float) -> bool:
        """Wait until all of these have ended, at most `timeout_s`; not to be cancelled."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        left = set(pidfds)

        def ended(pidfd: int) -> None:
            loop.remove_reader(pidfd)
            left.discard(pidfd)
            if not left:
                finish()

        def finish() -> None:
            if not over.done():
                over.set_result(None)

        for pidfd in pidfds:
            loop.add_reader(pidfd, ended, pidfd)
        timer = loop.call_later(timeout_s, finish)
        try:
            while left and not over.done():
                try:
                    await asyncio.shield(over)
                except asyncio.CancelledError:
                    self.interrupted = True
        finally:
            timer.cancel()
            for pidfd in left:
                loop.remove_reader(pidfd)
        return not left


def describe(exit_: Exit) -> str:
    """An exit in words: `exit code 3`, `signal 9 (SIGKILL)`."""
    return signal_name(exit_.signal) if exit_.signal is not None else f"exit code {exit_.exit_code}"


def signal_name(number: int) -> str:
    """A signal in words; real-time signals have no name."""
    with suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"
