"""The connection between the driver and a host: messages over TCP, many times cheaper than calls through Ray.

The driver gives each host a key, by way of Ray. Each end proves that it knows half of it before anything that it sends
is read. Where Ray uses TLS, so does the connection. A frame has a length for each of its parts, then the parts: a
message in JSON, then its blobs.
"""

import asyncio
import hmac
import os
import secrets
import socket
import ssl
import struct
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from loopwright.execution.ray.messages import Blobs, decode, encode

_HALF_BYTES = 16
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

    def on_end(self) -> None:
        """Called when the connection is lost or closed."""


class HostChannel(asyncio.Protocol):
    """One end of a connection. `admit` tells from the peer's half of the key who uses it: None for a stranger."""

    def __init__(self, admit: Callable[[bytes], ChannelUser | None]) -> None:
        self.admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._admit = admit
        self._user: ChannelUser | None = None
        self._incoming = bytearray()

    def send(self, message: Mapping[str, Any], blobs: Blobs = ()) -> None:
        """Send a message, now or as soon as the peer reads."""
        parts = (encode(message), *blobs)
        lengths = struct.pack(f">{len(parts)}Q", *map(len, parts))
        self._transport.write(b"".join((_COUNT.pack(len(parts)), lengths, *parts)))

    def prove(self, half: bytes) -> None:
        """Send our half of the key."""
        self._transport.write(half)

    def close(self) -> None:
        """Disconnect once everything is sent."""
        self._transport.close()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        asyncio.get_running_loop().call_later(_CONNECT_S, lambda: self.admitted.done() or transport.abort())

    def data_received(self, data: bytes) -> None:
        self._incoming += data
        if self._user is None:
            if len(self._incoming) < _HALF_BYTES:
                return
            self._user = self._admit(bytes(self._incoming[:_HALF_BYTES]))
            if self._user is None:
                self._transport.abort()
                return
            del self._incoming[:_HALF_BYTES]
            self._user.on_connect(self)
            self.admitted.set_result(True)
        while (parts := self._next_frame()) is not None:
            self._user.on_message(decode(parts[0]), parts[1:])

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
        if len(self._incoming) < start + sum(lengths):
            return None
        parts = []
        for length in lengths:
            parts.append(bytes(self._incoming[start : start + length]))
            start += length
        del self._incoming[:start]
        return parts

    def connection_lost(self, error: Exception | None) -> None:
        if self._user is not None:
            self._user.on_end()
        elif not self.admitted.done():
            self.admitted.set_result(False)


class Listener:
    """Where hosts connect to their driver."""

    def __init__(self, host: str) -> None:
        """`host` is the driver's address as other nodes see it."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, 0), family=family)
        except OSError:  # other nodes reach this machine by an address that it does not have itself
            self._socket = socket.create_server(("", 0), family=family)
        self.address: tuple[str, int] = host, self._socket.getsockname()[1]
        self._expected: dict[bytes, tuple[bytes, ChannelUser]] = {}
        self._server: asyncio.Future[asyncio.Server] | None = None

    def expect(self, user: ChannelUser) -> bytes:
        """A new key, with which one host may connect."""
        if self._server is None:
            tls, loop = _tls(ssl.Purpose.CLIENT_AUTH), asyncio.get_running_loop()
            serving = loop.create_server(self._accept, sock=self._socket, backlog=_BACKLOG, ssl=tls)
            self._server = asyncio.ensure_future(serving)
        key = secrets.token_bytes(2 * _HALF_BYTES)
        self._expected[key[:_HALF_BYTES]] = key[_HALF_BYTES:], user
        return key

    async def close(self) -> None:
        """Accept no connection any longer."""
        if self._server is not None:
            (await self._server).close()
        self._socket.close()

    def _accept(self) -> HostChannel:
        def admit(half: bytes) -> ChannelUser | None:
            other_half, user = self._expected.pop(half, (b"", None))
            channel.prove(other_half)
            return user

        channel = HostChannel(admit)
        return channel


async def connect(address: tuple[str, int], key: bytes, user: ChannelUser) -> None:
    """Connect to the driver. OSError if it cannot be reached, or does not know the key."""

    def admit(half: bytes) -> ChannelUser | None:
        return user if hmac.compare_digest(half, key[_HALF_BYTES:]) else None

    tls = _tls(ssl.Purpose.SERVER_AUTH)
    async with asyncio.timeout(_CONNECT_S):
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(lambda: HostChannel(admit), *address, ssl=tls)
        channel.prove(key[:_HALF_BYTES])
        if not await channel.admitted:
            raise ConnectionRefusedError("another program answers there")


def _tls(purpose: ssl.Purpose) -> ssl.SSLContext | None:
    """The certificates that Ray itself uses; None if it uses none. Each end must have one of Ray's authority."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    context = ssl.create_default_context(purpose, cafile=os.environ["RAY_TLS_CA_CERT"])
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    return context
