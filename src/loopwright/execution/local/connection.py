"""Frames between a worker and its parent: four bytes of length, then JSON, on a socket that never blocks the parent."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import orjson

Frame = dict[str, Any]

_PIECE_BYTES = 8192


class FrameSocket:
    """The parent's end. `received` is told each frame, and None when the worker has hung up."""

    def __init__(self, received: Callable[[Frame | None], None]) -> None:
        self._socket, self.child = socket.socketpair()
        self._socket.setblocking(False)
        self._received = received
        self._incoming = bytearray()
        self._outgoing = b""
        self._writing = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Listen from now on."""
        self.detach()
        self._loop = loop
        loop.add_reader(self._socket, self._on_readable)
        self._on_writable()

    def detach(self) -> None:
        """Listen no more. Safe to call twice, and after the loop was closed."""
        if self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._socket)
                self._loop.remove_writer(self._socket)
            self._loop, self._writing = None, False

    def send(self, frame: Frame) -> None:
        """Send a frame, now or as soon as the worker takes it. A worker that is gone is noticed by its end."""
        body = orjson.dumps(frame)
        self._outgoing += len(body).to_bytes(4, "big") + body
        self._on_writable()

    def close(self) -> None:
        """Hang up."""
        self.detach()
        self._socket.close()
        self.child.close()

    def _on_writable(self) -> None:
        try:
            if self._outgoing:
                self._outgoing = self._outgoing[self._socket.send(self._outgoing) :]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing = b""
        if self._loop is not None and bool(self._outgoing) is not self._writing:
            self._writing = not self._writing
            if self._writing:
                self._loop.add_writer(self._socket, self._on_writable)
            else:
                self._loop.remove_writer(self._socket)

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(_PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.detach()
            self._received(None)
            return
        if not self._incoming and len(data) == 4 + int.from_bytes(data[:4], "big"):
            # As good as always: one frame, in one piece.
            self._received(orjson.loads(data[4:]))
            return
        self._incoming += data
        while len(self._incoming) >= 4:
            end = 4 + int.from_bytes(self._incoming[:4], "big")
            if len(self._incoming) < end:
                return
            frame = orjson.loads(self._incoming[4:end])
            del self._incoming[:end]
            self._received(frame)
