"""Addresses, and channels that send and receive frames over a stream socket."""

import ipaddress
import math
import os
import socket
import stat
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path
from urllib.parse import urlsplit

from loopwright.core.errors import LoopwrightError
from loopwright.envs.live.wire import HEADER_BYTES, Framer, Message, body_bytes, unpack

_RECEIVE_BYTES = 65536
_BACKLOG = 128
_ADDRESS_FORMS = "Write 'unix:///path/to.sock' or 'tcp://host:port'."


class AddressError(LoopwrightError, ValueError):
    """An address that cannot be used: malformed, in use, or reachable from the network without `public`."""


@dataclass(frozen=True)
class Address:
    """`unix:///path` or `tcp://host:port`."""

    path: Path | None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Parse an address. An AddressError says how to write one."""
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise AddressError(f"{text!r} is not an address: {error}. {_ADDRESS_FORMS}") from None
        if parts.scheme == "unix" and not parts.netloc and Path(parts.path).name:
            return cls(Path(text.removeprefix("unix://")))
        if parts.scheme == "tcp" and host and port is not None and not parts.path.strip("/"):
            return cls(None, host, port)
        raise AddressError(f"{text!r} is not an address. {_ADDRESS_FORMS}")

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix://{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    def connect(self, timeout_s: float) -> socket.socket:
        """A connected socket. Raises OSError."""
        if self.path is None:
            return socket.create_connection((self.host, self.port), timeout_s)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(timeout_s)
            connection.connect(str(self.path))
        except BaseException:
            connection.close()
            raise
        return connection

    def listen(self, *, public: bool) -> socket.socket:
        """A listening socket. Raises AddressError if the address is in use, or is not local and `public` is false."""
        try:
            return self._listen_tcp(public=public) if self.path is None else self._listen_unix(self.path)
        except OSError as error:
            raise AddressError(
                f"cannot listen at {self}: {error.strerror or error}. Choose another address."
            ) from error

    def _listen_tcp(self, *, public: bool) -> socket.socket:
        candidates = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = candidates[0]
        if not public and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            raise AddressError(
                f"{self} can be reached from other machines, and every client can step the environment: there is no "
                "password. Serve at 127.0.0.1 or unix:///path, or allow it with --public (public=True)."
            )
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener

    def _listen_unix(self, path: Path) -> socket.socket:
        # Lock the directory: of two servers that find the same stale socket, one must not remove the other's new one.
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            flock(directory, LOCK_EX)
            self._remove_stale_socket(path)
            listener = socket.socket(socket.AF_UNIX)
            try:
                listener.bind(str(path))
                # Set the mode before listening, so that the socket is never open to other users.
                path.chmod(0o600)
                listener.listen(_BACKLOG)
            except BaseException:
                listener.close()
                raise
        finally:
            os.close(directory)
        return listener

    def _remove_stale_socket(self, path: Path) -> None:
        if not path.exists():
            return
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise AddressError(f"cannot listen at {self}: the file exists and is not a socket. Choose another path.")
        try:
            self.connect(1.0).close()
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise AddressError(f"cannot listen at {self}: another server uses it. Choose another path.")


class Channel:
    """Sends and receives messages on a connected socket. One thread may send while another one receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Detects within minutes that the other machine has vanished.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        self._socket = connection
        self._framer = Framer()
        self._buffer = b""
        self._timeout_s = self._socket_timeout_s = math.inf

    def set_timeout(self, timeout_s: float) -> None:
        """How long the peer may be silent while `receive` or `send` waits for it: then they raise TimeoutError."""
        self._timeout_s = timeout_s
        self._set_socket_timeout(timeout_s)

    def _set_socket_timeout(self, timeout_s: float) -> None:
        # Kernel timeouts, since Python's cost a second system call each time.
        whole, part = (0, 0) if timeout_s == math.inf else divmod(max(1, int(timeout_s * 1e6)), 1_000_000)
        timeval = struct.pack("@ll", whole, part)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        self._socket_timeout_s = timeout_s

    def send(self, message: Message) -> None:
        """Send a message. Raises Unsendable if it cannot be encoded; then nothing was sent."""
        data = self._framer.frame(message)
        try:
            self._socket.sendall(data)
        except BlockingIOError:
            raise TimeoutError("the peer does not read") from None

    def receive(self, deadline_s: float = math.inf) -> Message:
        """The next message. Raises TimeoutError after the timeout or at `deadline_s` (monotonic), EOFError at the end.

        The first read waits for the whole timeout, which must not end after `deadline_s`.
        """
        if self._buffer:
            return self.receive_within(deadline_s)
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            raise TimeoutError("the peer is silent") from None
        if not data:
            raise EOFError("the peer closed the connection")
        # The usual case: exactly one frame.
        if len(data) > HEADER_BYTES and len(data) == HEADER_BYTES + int.from_bytes(data[:HEADER_BYTES], "big"):
            return unpack(data[HEADER_BYTES:])
        self._buffer = data
        return self.receive_within(deadline_s)

    def receive_within(self, deadline_s: float) -> Message:
        """Like `receive`, but checks the deadline before every read."""
        buffer, self._buffer = bytearray(self._buffer), b""
        try:
            self._read_to(buffer, HEADER_BYTES, deadline_s)
            end = HEADER_BYTES + body_bytes(buffer)
            self._read_to(buffer, end, deadline_s)
        finally:
            if self._socket_timeout_s != self._timeout_s:
                self._set_socket_timeout(self._timeout_s)
        self._buffer = bytes(buffer[end:])
        with memoryview(buffer) as view:
            return unpack(view[HEADER_BYTES:end])

    def _read_to(self, buffer: bytearray, size_bytes: int, deadline_s: float) -> None:
        """Read until the buffer has at least `size_bytes`."""
        count = len(buffer)
        buffer.extend(bytes(max(0, size_bytes - count)))
        with memoryview(buffer) as view:
            while count < size_bytes:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("the deadline has passed")
                if left_s < self._socket_timeout_s:
                    self._set_socket_timeout(left_s)
                try:
                    received = self._socket.recv_into(view[count:])
                except BlockingIOError:
                    raise TimeoutError("the peer is silent") from None
                if not received:
                    where = " in the middle of a frame" if count else ""
                    raise EOFError(f"the peer closed the connection{where}")
                count += received

    def shutdown(self) -> None:
        """Shut the connection down: a pending `receive` or `send` returns, on both sides. Callable from any thread."""
        with suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
