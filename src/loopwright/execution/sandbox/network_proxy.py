"""The gate of a room: namespaces without any network, and the doors in them that lead to fixed addresses outside.

The listening sockets are made inside by a small process that hands them out and ends; the forwarding is done by us.
So nothing of ours runs inside, no door leads anywhere but where it was meant to, and all of it is gone with us.
"""

import asyncio
import ipaddress
import os
import shutil
import socket
import subprocess
import sys
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from loopwright.execution.sandbox import network_proxy_main as gate_main
from loopwright.execution.sandbox.base import SandboxError

TOOLS = ("unshare", "nsenter", "prlimit")
"""What a room is made with, besides bubblewrap."""
_TIMEOUT_S = 30.0
_MOST_DOORS = 200
_MOST_CONNECTIONS = 32
"""How many a room has open at a time: each takes up to three files of ours, of which all rooms have a thousand."""
_PAUSE_S = 1.0
"""Seconds until the next try to take a connection, where we have no files left."""
_CHUNK_BYTES = 1 << 16
_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_LOOPBACK = ipaddress.ip_network("127.0.0.0/8")
_WAYS = {"user": "user", "net": "net", "mount": "mnt"}
_MAKE = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--", sys.executable, "-IS", gate_main.__file__)


@dataclass(frozen=True)
class ForwardedPort:
    """One place that can be reached from inside, and what it is called there."""

    host: str
    port: int
    address: str
    """A loopback address inside."""

    @classmethod
    def to(cls, url: str, number: int) -> "ForwardedPort":
        """The door for a URL, the `number`-th of a room."""
        host, port = _place(url)
        loopback = _is_address(host) and ipaddress.ip_address(host) in _LOOPBACK
        # Each place elsewhere has an address of its own, since several may have the same port.
        return cls(host, port, host if loopback else f"127.77.0.{number + 1}")

    @property
    def named(self) -> bool:
        """Whether the name leads there also inside, so that certificates still fit."""
        return not _is_address(self.host)

    def inside(self, parts: SplitResult) -> str:
        """What such a URL is called inside."""
        if self.named or self.host == self.address:
            return parts.geturl()
        return parts._replace(netloc=f"{self.address}:{self.port}").geturl()


class NetworkProxy:
    """Namespaces for one room, kept alive by open files of ours, and the forwarding through its doors."""

    def __init__(self, allowed_urls: tuple[str, ...]) -> None:
        places = {_place(url): url for url in allowed_urls}
        if len(places) > _MOST_DOORS:
            raise SandboxError(f"a room cannot have {len(places)} doors. Give it {_MOST_DOORS} at most.")
        self.doors = {place: ForwardedPort.to(url, number) for number, (place, url) in enumerate(places.items())}
        self.laid: tuple[str, ...] = ()
        """The directories below `scratch/root` that have a writable layer over them."""
        self.shut = False
        """Whether nobody is let through for now."""
        self._namespaces: dict[str, int] = {}
        self.free = asyncio.Semaphore(_MOST_CONNECTIONS)
        self._stack = AsyncExitStack()

    async def open(self, scratch: Path, lowers: tuple[str, ...]) -> None:
        """Make the namespaces, lay writable layers over these directories of the root if it can be done, and listen."""
        addresses = [f"{door.address}:{door.port}" for door in self.doors.values()]
        making = asyncio.ensure_future(asyncio.to_thread(self._make, scratch, lowers, addresses))
        try:
            sockets = await asyncio.shield(making)
        except asyncio.CancelledError:
            # What it makes must be closed, so it is waited for.
            with suppress(SandboxError):
                for made in await making:
                    made.close()
            raise
        await self.serve(sockets)

    async def serve(self, sockets: list[socket.socket]) -> None:
        """Carry connections from these listening sockets, one for each door."""
        for door, listening in zip(self.doors.values(), sockets, strict=True):
            await self._stack.enter_async_context(_Forwarder(door, listening, self))

    async def close(self) -> None:
        """Shut the doors; what still runs inside is on its own."""
        await self._stack.aclose()
        for file in self._namespaces.values():
            os.close(file)
        self._namespaces.clear()

    @property
    def net(self) -> int:
        """The number of the network namespace: all processes of the room are in it, and no others."""
        return os.fstat(self._namespaces["net"]).st_ino

    def enter(self) -> tuple[str, ...]:
        """The beginning of a command that runs inside the namespaces."""
        own = f"/proc/{os.getpid()}/fd"
        ways = [f"--{name}={own}/{self._namespaces[kind]}" for name, kind in _WAYS.items()]
        return ("nsenter", "--preserve-credentials", *ways, "--")

    def hosts(self) -> str:
        """What /etc/hosts says inside."""
        named = [f"{door.address}\t{door.host}\n" for door in self.doors.values() if door.named]
        return "".join(["127.0.0.1\tlocalhost\n", *named])

    def url_inside(self, url: str) -> str:
        """What a URL is called inside."""
        door = self.doors.get(_place(url))
        if door is None:
            raise SandboxError(f"{url} cannot be reached from this room. Name it in `reach` when the room is made.")
        return door.inside(urlsplit(url))

    def _make(self, scratch: Path, lowers: tuple[str, ...], addresses: list[str]) -> list[socket.socket]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(_TIMEOUT_S)
            argv = (*_MAKE, str(scratch), ",".join(lowers), *addresses)
            try:
                done = subprocess.run(
                    argv,
                    stdin=theirs.fileno(),
                    capture_output=True,
                    env=plain_environment(),
                    timeout=_TIMEOUT_S,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise SandboxError(explain(str(error))) from error
            theirs.close()
            message, files = received(ours, len(addresses) + len(_WAYS))
        if not message:
            raise SandboxError(explain(done.stderr.decode(errors="replace")))
        self._namespaces = dict(zip(("user", "net", "mnt"), files[len(addresses) :], strict=True))
        self.laid = tuple(message.decode().split(",")[1:])
        return [socket.socket(fileno=file) for file in files[: len(addresses)]]


def received(caller: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """What gate_main.py says, and so many files with it; SandboxError if we have no room for them."""
    message, files, _, _ = socket.recv_fds(caller, 256, count)
    if message and len(files) < count:
        for file in files:
            os.close(file)
        raise SandboxError("too many files are open for another room. Lower `concurrency`, or raise `ulimit -n`.")
    return message, files


class _Forwarder:
    """Carries connections from one door to its place; those that are too many for the room wait outside."""

    def __init__(self, door: ForwardedPort, listening: socket.socket, gate: NetworkProxy) -> None:
        self._door, self._listening, self._gate = door, listening, gate
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> None:
        self._listening.setblocking(False)
        self._accepting = asyncio.ensure_future(self._accept())

    async def __aexit__(self, *_: object) -> None:
        tasks = [self._accepting, *self._open]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listening.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                caller, _ = await loop.sock_accept(self._listening)
            except OSError:
                await asyncio.sleep(_PAUSE_S)
                continue
            try:
                await self._gate.free.acquire()
            except BaseException:
                caller.close()
                raise
            task = loop.create_task(self._forward(caller))
            self._open.add(task)
            task.add_done_callback(partial(self._ended, caller))

    def _ended(self, caller: socket.socket, task: asyncio.Task[None]) -> None:
        caller.close()
        self._open.discard(task)
        self._gate.free.release()

    async def _forward(self, caller: socket.socket) -> None:
        if self._gate.shut:
            return
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(sock=caller)
            try:
                there = await asyncio.open_connection(self._door.host, self._door.port)
                try:
                    await asyncio.gather(_carry(reader, there[1]), _carry(there[0], writer))
                finally:
                    there[1].close()
            finally:
                writer.close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    with suppress(OSError, RuntimeError):
        writer.write_eof()


def _place(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        parts, port = urlsplit(""), None
    if not parts.hostname or not port:
        raise SandboxError(f"{url!r} names no place that a room could reach. Write it as http://host:port.")
    # One place, or both would listen at the same address.
    return "127.0.0.1" if parts.hostname == "localhost" else parts.hostname, port


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def plain_environment() -> dict[str, str]:
    """What our own tools run with: where they are found, and nothing that a task could have given."""
    return {"PATH": os.environ.get("PATH", os.defpath)}


def explain(message: str) -> str:
    """Why there can be no rooms here, from what a tool said, and the next move."""
    advice = (
        "It needs user namespaces: as root, run sysctl -w user.max_user_namespaces=10000 "
        "kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0 (those that exist); "
        "in a container, start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined; "
        'or choose sandbox = "docker" or, for agents that you trust, "none".'
    )
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        advice = f"Install what has {', '.join(missing)}: apt-get install util-linux"
    return f"a bwrap room cannot be made here: {message.strip() or 'no answer'}. {advice}"
