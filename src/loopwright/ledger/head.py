"""The head of a ledger's checksum chain, in a small file beside it: how many events there are, and the last hash.

The order of writes makes sure that a crash never looks like damage, since the file may lag behind the ledger and the
ledger never behind the file:

1. SQLite commits the rows and their events.
2. `written` is overwritten in place, without a sync. It survives `kill -9`, as the commit does.
3. At most once a second, and on close: the write-ahead log is synced, then `synced` is written and the file synced.

After a power failure the file system may have stored 2 without 1. So `written` counts only as long as the machine was
not restarted (`boot`), and `synced` always.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from loopwright.core.errors import storage

_SYNC_S = 1.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def head_path(ledger: Path) -> Path:
    """The file beside a ledger."""
    return ledger.with_suffix(".head")


def boot_id() -> str:
    """Identifies the time since the machine was started; empty where the system does not tell."""
    try:
        return _BOOT.read_text("ascii").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class StoredHead:
    """What the file says: the number and the hash of an event."""

    count: int
    hash: bytes

    @classmethod
    def read(cls, ledger: Path) -> "StoredHead":
        """The event that the ledger must have. Raises ValueError if the file makes no sense, OSError without one."""
        for _ in range(20):  # the writer may be in the middle of it
            content = head_path(ledger).read_bytes()
            body, _, checksum = content.rstrip(b"\n").rpartition(b"\n")
            if checksum == b"sum     %08x" % crc32(body + b"\n"):
                break
            time.sleep(0.005)
        else:
            raise ValueError("its own checksum does not match")
        _, written, written_hash, _, synced, synced_hash, _, *boot = body.decode("ascii").split()
        if boot and boot == [boot_id()]:
            return cls(int(written), bytes.fromhex(written_hash))
        return cls(int(synced), bytes.fromhex(synced_hash))


class Head:
    """Writes the file. One writer, under the lock of the ledger's transaction."""

    def __init__(self, ledger: Path, last: tuple[int, bytes]) -> None:
        self.last = last
        """The number and the hash of the last event."""
        self._ledger, self._synced_at = ledger, 0.0
        with storage(ledger):
            self._file = os.open(head_path(ledger), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.sync()

    def write(self, last: tuple[int, bytes]) -> None:
        """Record an event that was committed."""
        self.last = last
        try:
            self._put()
        except OSError:
            with storage(self._ledger):
                raise
        if time.monotonic() - self._synced_at >= _SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Make what was committed durable, and then record that it is."""
        with storage(self._ledger):
            try:
                log = os.open(f"{self._ledger}-wal", os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                pass  # SQLite synced all of it into the ledger when it removed the log
            else:
                try:
                    os.fsync(log)
                finally:
                    os.close(log)
            synced = b"synced  %020d %b\n" % (self.last[0], self.last[1].hex().encode())
            self._rest = synced + b"boot    %-36b\n" % boot_id().encode()
            self._put()
            os.fsync(self._file)
        self._synced_at = time.monotonic()

    def _put(self) -> None:
        body = b"written %020d %b\n%b" % (self.last[0], self.last[1].hex().encode(), self._rest)
        os.pwrite(self._file, body + b"sum     %08x\n" % crc32(body), 0)

    def close(self) -> None:
        """Sync and close the file."""
        if self._file >= 0:
            try:
                self.sync()
            finally:
                os.close(self._file)
                self._file = -1
