"""Slots: the places where trials run at the same time, each with cores, devices and ports of its own."""

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from loopwright.core.errors import LaunchError


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


class Slots:
    """The slots of a run, granted in the order of the requests. No two trials have the same one at the same time.

    Each has its share of the cores and of the `devices`, and `ports` free ports. Not asyncio.Semaphore, which stays
    bound to the event loop in which it was first contended: each run has its own.
    """

    def __init__(
        self,
        count: int,
        *,
        pin_cpus: bool = False,
        devices: Sequence[str] = (),
        devices_each: int = 0,
        ports: int = 0,
    ) -> None:
        if count < 1:
            raise ValueError(f"parallel = {count}: must be at least 1")
        if devices_each * count > len(devices):
            raise ValueError(f"parallel = {count} with gpus = {devices_each} needs more than {len(devices)} devices")
        cores = sorted(os.sched_getaffinity(0))
        self._cores = core_sets(cores, count) if pin_cpus else [None] * count
        self._cpus = [",".join(map(str, sorted(pinned or cores))) for pinned in self._cores]
        self._devices = [
            ",".join(devices[number * devices_each : (number + 1) * devices_each]) for number in range(count)
        ]
        self._leases: list[list[PortLease]] = [[] for _ in range(count)]
        self._ports = ports
        self._free = deque(range(count))
        self._waiting: deque[asyncio.Future[int]] = deque()
        self._slots: list[Slot | None] = [None] * count

    async def acquire(self) -> Slot:
        """Wait for a free slot and take it."""
        if self._free:
            number = self._free.popleft()
        else:
            future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            try:
                number = await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():
                    self.release(Slot(future.result()))
                raise
        try:
            return self._slots[number] or self._slot(number)
        except BaseException:
            self.release(Slot(number))
            raise

    def release(self, slot: Slot) -> None:
        """Return a slot, which its number identifies; the longest waiting request gets it."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(slot.number)
                return
        # Last in, first out: the most recently used slot has a warm worker and warm caches.
        self._free.appendleft(slot.number)

    def close(self) -> None:
        """Release all ports."""
        for leases in self._leases:
            while leases:
                leases.pop().close()

    def with_free_ports(self, slot: Slot) -> Slot:
        """The same slot, with other ports if something else uses one of its ports by now."""
        leases = self._leases[slot.number]
        if all(lease.is_free for lease in leases):
            return slot
        self._slots[slot.number] = None
        while leases:
            leases.pop().close()
        return self._slot(slot.number)

    def _slot(self, number: int) -> Slot:
        leases = self._leases[number]
        while len(leases) < self._ports:
            leases.append(PortLease())
        values: dict[str, Any] = {"slot": number, "cpus": self._cpus[number]}
        values |= {"port" if n == 1 else f"port_{n}": lease.port for n, lease in enumerate(leases, 1)}
        if devices := self._devices[number]:
            values["gpu"] = devices
        variables = {f"LOOPWRIGHT_{name.upper()}": str(value) for name, value in values.items()}
        if devices:
            variables["ROCR_VISIBLE_DEVICES"] = devices
            if not os.path.exists("/dev/kfd"):  # noqa: PTH110  AMD's runtime would apply both, one after the other.
                variables["CUDA_VISIBLE_DEVICES"] = devices
        slot = self._slots[number] = Slot(number, self._cores[number], values, variables)
        return slot


class PortLease:
    """A free port. No other run of this machine gets it until it is closed, or this process ends."""

    # Below the ports that the kernel gives to outgoing connections.
    _FIRST, _COUNT = 20_000, 12_000

    def __init__(self) -> None:
        for offset in range(self._COUNT):
            self.port = self._FIRST + (os.getpid() * 37 + offset) % self._COUNT
            self._lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            with suppress(OSError):
                # An abstract name: it is unique on the machine, and gone with this process.
                self._lock.bind(f"\0loopwright-port-{self.port}")
                if self.is_free:
                    return
            self._lock.close()
        raise LaunchError(f"no port from {self._FIRST} to {self._FIRST + self._COUNT - 1} is free.", infra=True)

    @property
    def is_free(self) -> bool:
        """Whether a server could listen on it now."""
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                with socket.socket(family, socket.SOCK_STREAM) as probe:
                    if family is socket.AF_INET6:
                        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    probe.bind(("", self.port))
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):  # other errors: the kernel has no IPv6
                    return False
        return True

    def close(self) -> None:
        """Let others have the port."""
        self._lock.close()


def core_sets(cores: list[int], count: int) -> list[frozenset[int] | None]:
    """`count` sets of equal size, disjoint as long as there are enough cores."""
    size = max(1, len(cores) // count)
    return [frozenset(cores[(slot * size + i) % len(cores)] for i in range(size)) for slot in range(count)]
