"""Output on its way from a pipe to a file, capped: its beginning and its end are kept, the middle is counted.

Benchmarks print their result last, so the end of a long output is worth as much as its beginning.
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
# Appending, since a worker may empty the file once more after we have opened it.
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC


class CappedFile:
    """A file that takes `limit_bytes`, and of all that follows only the end. Opened at the first byte, or by `open`."""

    def __init__(self, path: str, limit_bytes: int) -> None:
        # A string: making two paths for each trial costs as much as calling a worker.
        self.path = path
        self.produced_bytes = 0
        self._left_bytes = self._limit_bytes = limit_bytes
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

    def ensure(self) -> None:
        """Create the file if nobody has done so yet."""
        if self._fd < 0 and not Path(self.path).exists():
            self.open()

    def write(self, chunk: bytes) -> None:
        """Take the next bytes."""
        self.produced_bytes += len(chunk)
        if self._left_bytes:
            if self._fd < 0:
                self.open()
            kept = chunk[: self._left_bytes]
            self._put(kept)
            self._left_bytes -= len(kept)
            chunk = chunk[len(kept) :]
        if chunk:
            if self._tail is None:
                self._tail = bytearray()
            self._tail += chunk
            if len(self._tail) > 2 * TAIL_BYTES:
                del self._tail[:-TAIL_BYTES]

    def finish(self) -> None:
        """Append the end of what was too long, and close the file."""
        try:
            if self._tail:
                del self._tail[:-TAIL_BYTES]
                if left_out := self.produced_bytes - self._limit_bytes - len(self._tail):
                    self._put(b"\n[loopwright: %d bytes left out]\n" % left_out)
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
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, memoryview(data)[written:])


class Pump:
    """The reading end of a pipe, and the file that its bytes go to. `sink` may be changed at any time."""

    def __init__(self, failed: Callable[[StorageError], None]) -> None:
        self.sink: CappedFile | None = None
        self._failed = failed
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Move what arrives from now on."""
        self.detach()
        self._loop = loop
        loop.add_reader(self._read_fd, self._step)

    def detach(self) -> None:
        """Stop moving. Safe to call twice, and after the loop was closed."""
        if self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._read_fd)
            self._loop = None

    def close_writer(self) -> None:
        """Close our copy of the end that the process writes to."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def drain(self) -> None:
        """Take what is there. Bounded, and not until the end: somebody may hold the pipe open and go on writing."""
        for _ in range(_DRAIN_CHUNKS):
            if not self._step():
                return

    def close(self) -> None:
        """Let go of the pipe."""
        self.detach()
        self.close_writer()
        if self._read_fd >= 0:
            os.close(self._read_fd)
            self._read_fd = -1

    def _step(self) -> bool:
        """Move one chunk, never more: other trials have their turn in between. Return whether there may be another."""
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
                self._failed(error)
        return True
