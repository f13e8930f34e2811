"""Copies process output from a pipe to a file with a size cap: keeps the beginning and the end, counts the middle.

Benchmarks print their result last, so the end of a long output is as valuable as its beginning.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from loopwright.core.errors import StorageError, storage

TAIL_BYTES = 64 * 1024
_CHUNK_BYTES = 64 * 1024
_DRAIN_CHUNKS = 32
# O_APPEND, since a worker may truncate the file again after we have opened it.
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC


class CappedFile:
    """A file with the first `limit_bytes` of the output and its last 64 KiB. Opened by the first write, or `open`."""

    def __init__(self, path: str, limit_bytes: int) -> None:
        # A string: creating two Path objects per trial costs as much as calling a worker.
        self.path = path
        self.produced_bytes = 0
        self._free_bytes = self._limit_bytes = limit_bytes
        self._tail: bytearray | None = None
        self._fd = -1

    def open(self) -> None:
        """Create the file, so that it exists even if nothing is printed."""
        with storage(Path(self.path)):
            try:
                self._fd = os.open(self.path, _FLAGS, 0o666)
            except FileNotFoundError:
                Path(self.path).parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self.path, _FLAGS, 0o666)

    def open_if_missing(self) -> None:
        """Create the file unless it exists."""
        if self._fd < 0 and not Path(self.path).exists():
            self.open()

    def write(self, chunk: bytes) -> None:
        """Add output."""
        self.produced_bytes += len(chunk)
        if self._free_bytes:
            head = chunk[: self._free_bytes]
            self._put(head)
            self._free_bytes -= len(head)
            chunk = chunk[len(head) :]
        if chunk:
            if self._tail is None:
                self._tail = bytearray()
            self._tail += chunk
            if len(self._tail) > 2 * TAIL_BYTES:
                del self._tail[:-TAIL_BYTES]

    def finish(self) -> None:
        """Append the end of a long output, and close the file."""
        try:
            if self._tail:
                del self._tail[:-TAIL_BYTES]
                if omitted := self.produced_bytes - self._limit_bytes - len(self._tail):
                    self._put(b"\n[loopwright: %d bytes left out]\n" % omitted)
                self._put(self._tail)
        finally:
            self.close()

    def close(self) -> None:
        """Close the file as it is. Safe to call twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _put(self, data: bytes | bytearray) -> None:
        if self._fd < 0:
            self.open()
        with storage(Path(self.path)):
            count = os.write(self._fd, data)
            while count < len(data):
                count += os.write(self._fd, memoryview(data)[count:])


class Pump:
    """The reading end of a pipe, and the file its bytes are written to. `sink` may change at any time."""

    def __init__(self, on_error: Callable[[StorageError], None]) -> None:
        self.sink: CappedFile | None = None
        self._on_error = on_error
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Copy output as it arrives."""
        self.detach()
        self._loop = loop
        loop.add_reader(self._read_fd, self._copy_chunk)

    def detach(self) -> None:
        """Stop copying. Safe to call twice, and after the loop was closed."""
        if self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._read_fd)
            self._loop = None

    def close_writer(self) -> None:
        """Close our copy of the writing end."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def drain(self) -> None:
        """Copy what is in the pipe. Bounded: another process may hold the pipe open and keep writing."""
        for _ in range(_DRAIN_CHUNKS):
            if not self._copy_chunk():
                return

    def close(self) -> None:
        """Close the pipe."""
        self.detach()
        self.close_writer()
        if self._read_fd >= 0:
            os.close(self._read_fd)
            self._read_fd = -1

    def _copy_chunk(self) -> bool:
        """Copy one chunk, so that other trials get their turn. Return whether there may be another one."""
        try:
            chunk = os.read(self._read_fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self.detach()
            return False
        if self.sink is not None:
            try:
                self.sink.write(chunk)
            except StorageError as error:
                sink, self.sink = self.sink, None
                with suppress(OSError):
                    sink.close()
                self._on_error(error)
        return True
