"""Channels: messages over a stream socket, one frame each: a length of four bytes and a body."""

import math
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from loopwright.envs.live.wire import HEADER_BYTES, Framer, body_bytes, unpack

_RECEIVE_BYTES = 65536


class Channel:
    """Sends and receives messages on a connected socket. One thread may send while another one receives.

    By default messages are those of the live protocol; `frame` and `unpack` encode and decode others.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        frame: Callable[[Any], bytes] | None = None,
        unpack: Callable[[bytes | memoryview], Any] = unpack,
    ) -> None:
        connection.setblocking(True)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Detects within minutes that the other machine has vanished.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        self._socket = connection
        self._frame, self._unpack = frame or Framer().frame, unpack
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

    def send(self, message: Any) -> None:
        """Send a message. Raises Unsendable if it cannot be encoded; then nothing was sent."""
        data = self._frame(message)
        try:
            self._socket.sendall(data)
        except BlockingIOError:
            raise TimeoutError("the peer does not read") from None

    def receive(self, deadline_s: float = math.inf) -> Any:
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
            return self._unpack(data[HEADER_BYTES:])
        self._buffer = data
        return self.receive_within(deadline_s)

    def receive_within(self, deadline_s: float) -> Any:
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
            return self._unpack(view[HEADER_BYTES:end])

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
