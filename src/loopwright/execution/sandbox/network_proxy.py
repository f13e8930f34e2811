"""The network proxy of a sandbox: namespaces without a network, and ports in them that forward to fixed addresses.

A small process inside creates the listening sockets, passes them to us and exits; we do the forwarding. So none of our
code runs inside, no port forwards to any other address, and all of it is gone with us.
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

from loopwright.execution.sandbox import network_proxy_main
from loopwright.execution.sandbox.base import SandboxError

TOOLS = ("unshare", "nsenter", "prlimit")
"""What the namespaces are created with, besides bubblewrap."""
_TIMEOUT_S = 30.0
_MAX_PORTS = 200
_MAX_CONNECTIONS = 32
"""Open connections of one sandbox: each takes up to three of our file descriptors, and all share about a thousand."""
_PAUSE_S = 1.0
"""Seconds before accepting again after running out of file descriptors."""
_CHUNK_BYTES = 1 << 16
_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_LOOPBACK = ipaddress.ip_network("127.0.0.0/8")
_NAMESPACES = {"user": "user", "net": "net", "mount": "mnt"}
_UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--", sys.executable, "-IS")


@dataclass(frozen=True)
class ForwardedPort:
    """One address outside that can be reached from inside, and its address there."""

    host: str
    port: int
    address: str
    """A loopback address inside."""

    @classmethod
    def create(cls, host: str, port: int, index: int) -> "ForwardedPort":
        """The forwarded port to this address, the `index`-th of a sandbox."""
        is_loopback = _is_ip(host) and ipaddress.ip_address(host) in _LOOPBACK
        # Each remote address gets its own loopback address, since several may use the same port.
        return cls(host, port, host if is_loopback else f"127.77.0.{index + 1}")

    @property
    def has_name(self) -> bool:
        """Whether it is reached by its host name inside too, so that certificates match."""
        return not _is_ip(self.host)

    def url_inside(self, url: SplitResult) -> str:
        """A URL with this address, as it is reached inside."""
        if self.has_name or self.host == self.address:
            return url.geturl()
        return url._replace(netloc=f"{self.address}:{self.port}").geturl()


class NetworkProxy:
    """The namespaces of one sandbox, kept alive by open files of ours, and the forwarding out of them."""

    def __init__(self, allowed_urls: tuple[str, ...]) -> None:
        addresses = dict.fromkeys(map(_address, allowed_urls))
        if len(addresses) > _MAX_PORTS:
            raise SandboxError(f"a sandbox can reach at most {_MAX_PORTS} addresses, not {len(addresses)}.")
        self.ports = {address: ForwardedPort.create(*address, index) for index, address in enumerate(addresses)}
        self.overlays: tuple[str, ...] = ()
        """The directories below `scratch/root` with a writable layer over them."""
        self.is_blocked = False
        """Whether connections are closed instead of forwarded."""
        self._namespaces: dict[str, int] = {}
        self._free = asyncio.Semaphore(_MAX_CONNECTIONS)
        self._stack = AsyncExitStack()

    async def open(self, scratch: Path, lowers: tuple[str, ...]) -> None:
        """Create the namespaces, with writable layers over these directories where possible, and start forwarding."""
        addresses = [f"{port.address}:{port.port}" for port in self.ports.values()]
        creation = asyncio.ensure_future(asyncio.to_thread(self._create, scratch, lowers, addresses))
        try:
            listeners = await asyncio.shield(creation)
        except asyncio.CancelledError:
            # Wait for it anyway, to close what it opens.
            with suppress(SandboxError):
                for listener in await creation:
                    listener.close()
            raise
        await self.serve(listeners)

    async def serve(self, listeners: list[socket.socket]) -> None:
        """Forward connections from these listening sockets, one for each port."""
        for port, listener in zip(self.ports.values(), listeners, strict=True):
            await self._stack.enter_async_context(_Forwarder(port, listener, self, self._free))

    async def close(self) -> None:
        """Stop forwarding; processes inside are not ended."""
        await self._stack.aclose()
        for file in self._namespaces.values():
            os.close(file)
        self._namespaces.clear()

    @property
    def net(self) -> int:
        """The number of the network namespace, which all processes of the sandbox and no others are in."""
        return os.fstat(self._namespaces["net"]).st_ino

    def enter(self) -> tuple[str, ...]:
        """The beginning of a command that runs inside the namespaces."""
        own = f"/proc/{os.getpid()}/fd"
        options = [f"--{name}={own}/{self._namespaces[kind]}" for name, kind in _NAMESPACES.items()]
        return ("nsenter", "--preserve-credentials", *options, "--")

    def hosts(self) -> str:
        """The content of /etc/hosts inside."""
        names = [f"{port.address}\t{port.host}\n" for port in self.ports.values() if port.has_name]
        return "".join(["127.0.0.1\tlocalhost\n", *names])

    def url_inside(self, url: str) -> str:
        """The URL by which an allowed URL is reached inside."""
        port = self.ports.get(_address(url))
        if port is None:
            raise SandboxError(f"{url} cannot be reached from this sandbox. Add it to `allowed_urls` of `open`.")
        return port.url_inside(urlsplit(url))

    def _create(self, scratch: Path, lowers: tuple[str, ...], addresses: list[str]) -> list[socket.socket]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(_TIMEOUT_S)
            argv = (*_UNSHARE, network_proxy_main.__file__, str(scratch), ",".join(lowers), *addresses)
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
            message, files = receive_files(ours, len(addresses) + len(_NAMESPACES))
        if not message:
            raise SandboxError(explain(done.stderr.decode(errors="replace")))
        self._namespaces = dict(zip(_NAMESPACES.values(), files[len(addresses) :], strict=True))
        self.overlays = tuple(message.decode().split(",")[1:])
        return [socket.socket(fileno=file) for file in files[: len(addresses)]]


def receive_files(connection: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """The message of network_proxy_main.py with its open files; SandboxError if we are out of file descriptors."""
    message, files, _, _ = socket.recv_fds(connection, 256, count)
    if message and len(files) < count:
        for file in files:
            os.close(file)
        raise SandboxError("too many open files for another sandbox. Lower `concurrency`, or raise `ulimit -n`.")
    return message, files


class _Forwarder:
    """Forwards connections of one port; those beyond the sandbox's limit wait to be accepted."""

    def __init__(
        self, port: ForwardedPort, listener: socket.socket, proxy: NetworkProxy, free: asyncio.Semaphore
    ) -> None:
        self._port, self._listener, self._proxy, self._free = port, listener, proxy, free
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> None:
        self._listener.setblocking(False)
        self._accepting = asyncio.ensure_future(self._accept())

    async def __aexit__(self, *_: object) -> None:
        tasks = [self._accepting, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(_PAUSE_S)
                continue
            try:
                await self._free.acquire()
            except BaseException:
                client.close()
                raise
            task = loop.create_task(self._forward(client))
            self._connections.add(task)
            # A callback, since a task that is cancelled before its first step runs no `finally`.
            task.add_done_callback(partial(self._on_done, client))

    def _on_done(self, client: socket.socket, task: asyncio.Task[None]) -> None:
        client.close()
        self._connections.discard(task)
        self._free.release()

    async def _forward(self, client: socket.socket) -> None:
        if self._proxy.is_blocked:
            return
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(sock=client)
            try:
                remote_reader, remote_writer = await asyncio.open_connection(self._port.host, self._port.port)
                try:
                    await asyncio.gather(_copy(reader, remote_writer), _copy(remote_reader, writer))
                finally:
                    remote_writer.close()
            finally:
                writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    with suppress(OSError, RuntimeError):
        writer.write_eof()


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        parts, port = urlsplit(""), None
    if not parts.hostname or not port:
        raise SandboxError(f"{url!r} has no host and port to allow. Write it as http://host:port.")
    # One spelling, or two ports would listen at the same address.
    return "127.0.0.1" if parts.hostname == "localhost" else parts.hostname, port


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def plain_environment() -> dict[str, str]:
    """The environment of our own tools: their PATH, and nothing a task could have set."""
    return {"PATH": os.environ.get("PATH", os.defpath)}


def explain(message: str) -> str:
    """Why sandboxes are not available here, from the message of a tool, and how to fix it."""
    advice = (
        "It needs user namespaces: as root, run sysctl -w user.max_user_namespaces=10000 "
        "kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0 (those that exist); "
        "in a container, start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined; "
        'or choose sandbox = "docker" or, for agents that you trust, "none".'
    )
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        advice = f"Install {', '.join(missing)}: apt-get install util-linux"
    return f"cannot create a bwrap sandbox here: {message.strip() or 'no error message'}. {advice}"
