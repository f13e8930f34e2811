"""The connection between the driver and a host: messages over TCP, many times cheaper than calls through Ray.

The driver gives each host a key, by way of Ray: an id, which may be seen, and a secret for each end. Each end proves
that it knows its secret before anything else that it sends is read. Where Ray uses TLS, so does the connection. A frame
has a length for each of its parts, then the parts: a message in JSON, then its blobs. It has a limit, which follows
from `[system] artifacts`.
"""

import asyncio
import hmac
import os
import secrets
import socket
import ssl
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from loopwright.core.errors import LaunchError
from loopwright.execution.ray.messages import Blobs, decode, encode
from loopwright.execution.ray.options import uses_tls

_ID_BYTES, _SECRET_BYTES = 8, 16
_PROOF_BYTES = _ID_BYTES + _SECRET_BYTES
"""What each end sends first: the id of the key, and its secret."""
_MESSAGE_BYTES = 64 * 2**20
"""How much of a frame may be other than the content of files: the message, and the names of packed files."""
_COUNT = struct.Struct(">I")
"""Starts a frame: how many parts it has. Their lengths follow, as `>Q` each."""
_MAX_PARTS = 1000
_CONNECT_S = 20.0
_BACKLOG = 1024


class ChannelUser(Protocol):
    """What each end does with its channel."""

    def on_connect(self, channel: "HostChannel") -> None:
        """Called once, before anything else."""

    def on_message(self, message: dict[str, Any], blobs: Blobs) -> None:
        """Called with each message."""

    def on_end(self, error: Exception | None = None) -> None:
        """Called when the connection is lost or closed, with what was wrong with what came over it."""


class HostChannel(asyncio.Protocol):
    """One end of a connection. `admit` tells from the peer's proof who uses it: None for a stranger.

    No frame has much more than twice `artifact_bytes`: the files of a trial, and the modules of its function.
    """

    def __init__(self, admit: Callable[[bytes], ChannelUser | None], artifact_bytes: int) -> None:
        self.admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._admit = admit
        self._max_bytes = 2 * artifact_bytes + _MESSAGE_BYTES
        self._user: ChannelUser | None = None
        self._incoming = bytearray()

    def send(self, message: Mapping[str, Any], blobs: Blobs = ()) -> None:
        """Send a message, now or as soon as the peer reads. LaunchError if it is too large."""
        parts = (encode(message), *blobs)
        lengths = list(map(len, parts))
        self._check_size(lengths)
        self._transport.write(b"".join((_COUNT.pack(len(parts)), struct.pack(f">{len(parts)}Q", *lengths), *parts)))

    def prove(self, proof: bytes) -> None:
        """Send that we know the key."""
        self._transport.write(proof)

    def close(self) -> None:
        """Disconnect once everything is sent."""
        self._transport.close()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        asyncio.get_running_loop().call_later(_CONNECT_S, lambda: self.admitted.done() or transport.abort())

    def data_received(self, data: bytes) -> None:
        self._incoming += data
        if self._user is None:
            if len(self._incoming) < _PROOF_BYTES:
                return
            self._user = self._admit(bytes(self._incoming[:_PROOF_BYTES]))
            if self._user is None:
                self._transport.abort()
                return
            del self._incoming[:_PROOF_BYTES]
            self._user.on_connect(self)
            self.admitted.set_result(True)
        try:
            while (parts := self._next_frame()) is not None:
                self._user.on_message(decode(parts[0]), parts[1:])
        except Exception as error:  # noqa: BLE001  The event loop would log it, and nobody would learn of it.
            self._transport.abort()
            self._user.on_end(error)

    def _next_frame(self) -> list[bytes] | None:
        """The parts of the first frame, once all of it is there."""
        if len(self._incoming) < _COUNT.size:
            return None
        (count,) = _COUNT.unpack_from(self._incoming)
        if not 1 <= count <= _MAX_PARTS:
            raise ValueError(f"a frame of {count:,} parts")
        start = _COUNT.size + 8 * count
        if len(self._incoming) < start:
            return None
        lengths = struct.unpack_from(f">{count}Q", self._incoming, _COUNT.size)
        self._check_size(lengths)
        if len(self._incoming) < start + sum(lengths):
            return None
        parts = []
        for length in lengths:
            parts.append(bytes(self._incoming[start : start + length]))
            start += length
        del self._incoming[:start]
        return parts

    def _check_size(self, lengths: Sequence[int]) -> None:
        if (size := sum(lengths)) > self._max_bytes:
            raise LaunchError(
                f"{size:,} bytes for one trial are more than a Ray host and its driver send each other, "
                f"{self._max_bytes:,}: twice [system] artifacts, and {_MESSAGE_BYTES:,}. Raise artifacts, or use an "
                "--output that all nodes share."
            )

    def connection_lost(self, error: Exception | None) -> None:
        if self._user is not None:
            self._user.on_end()
        elif not self.admitted.done():
            self.admitted.set_result(False)


class Listener:
    """Where hosts connect to their driver."""

    def __init__(self, host: str, artifact_bytes: int) -> None:
        """`host` is the driver's address as other nodes see it."""
        self._artifact_bytes = artifact_bytes
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, 0), family=family)
        except OSError:  # other nodes reach this machine by an address that it does not have itself
            self._socket = socket.create_server(("", 0), family=family)
        self.address: tuple[str, int] = host, self._socket.getsockname()[1]
        self._expected: dict[bytes, tuple[bytes, ChannelUser]] = {}
        """The keys that nobody has used, by their ids."""
        self._server: asyncio.Future[asyncio.Server] | None = None

    def expect(self, user: ChannelUser) -> bytes:
        """A new key, with which one host may connect."""
        if self._server is None:
            tls, loop = _tls(ssl.Purpose.CLIENT_AUTH), asyncio.get_running_loop()
            serving = loop.create_server(self._accept, sock=self._socket, backlog=_BACKLOG, ssl=tls)
            self._server = asyncio.ensure_future(serving)
        key = secrets.token_bytes(_ID_BYTES + 2 * _SECRET_BYTES)
        self._expected[key[:_ID_BYTES]] = key, user
        return key

    async def close(self) -> None:
        """Accept no connection any longer."""
        if self._server is not None:
            (await self._server).close()
        self._socket.close()

    def _accept(self) -> HostChannel:
        def admit(proof: bytes) -> ChannelUser | None:
            key, user = self._expected.get(proof[:_ID_BYTES], (bytes(_PROOF_BYTES), None))
            if not hmac.compare_digest(proof, key[:_PROOF_BYTES]) or user is None:
                return None
            del self._expected[proof[:_ID_BYTES]]
            channel.prove(key[:_ID_BYTES] + key[_PROOF_BYTES:])
            return user

        channel = HostChannel(admit, self._artifact_bytes)
        return channel


async def connect(address: tuple[str, int], key: bytes, user: ChannelUser, artifact_bytes: int) -> None:
    """Connect to the driver. OSError if it cannot be reached, or does not know the key."""

    def admit(proof: bytes) -> ChannelUser | None:
        return user if hmac.compare_digest(proof, key[:_ID_BYTES] + key[_PROOF_BYTES:]) else None

    tls = _tls(ssl.Purpose.SERVER_AUTH)
    async with asyncio.timeout(_CONNECT_S):
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(lambda: HostChannel(admit, artifact_bytes), *address, ssl=tls)
        channel.prove(key[:_PROOF_BYTES])
        if not await channel.admitted:
            raise ConnectionRefusedError("another program answers there")


def _tls(purpose: ssl.Purpose) -> ssl.SSLContext | None:
    """The certificates that Ray itself uses; None if it uses none. Each end must have one of Ray's authority."""
    if not uses_tls():
        return None
    context = ssl.create_default_context(purpose, cafile=os.environ["RAY_TLS_CA_CERT"])
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    return context
