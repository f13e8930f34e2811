"""SQLite as we use it: write-ahead log, explicit transactions, a checksum chain, errors that name the fix."""

import fcntl
import math
import mmap
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import Any
from zlib import crc32

import orjson

from loopwright.core.errors import LedgerError, OutputBusy, storage

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS

ORIGIN = bytes(16)
"""The hash before the first event of a chain."""
BATCH = 256
"""How many live rows one event covers, so that damage is located without an event for each row."""
HEAD_SUFFIX = ".head"
HEAD_RECORD = Struct(">Q16s36s")
"""A record of the head: the number and the hash of an event, and the boot id; a checksum of 4 bytes follows."""
BOOT_ID = os.urandom(16).hex().encode()
"""Identifies the time since the machine was started; where the system does not tell, that of this process."""
with suppress(OSError):
    BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
MOUNTS = Path("/proc/self/mounts")
NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "afs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "fuse.sshfs",
    "fuse.ceph",
    "fuse.glusterfs",
)
"""How the names of file systems begin whose files are shared by machines."""
_SYNC_S = 1.0
_RECORD_BYTES = HEAD_RECORD.size + 4
_HEAD_BYTES = 4 * _RECORD_BYTES
# sqlite3 looks for an adapter for values of these types. Not finding one takes it a microsecond each time.
for _type in (bool, bytes, type(None)):
    sqlite3.register_adapter(_type, lambda value: value)


def damaged(path: Path, detail: str) -> str:
    """The message for a file that SQLite cannot read."""
    return (
        f"{path} is damaged ({detail}). Nothing was changed. Save what is readable with "
        f"`sqlite3 {path.name} .recover`, or move the run's folder away and run again."
    )


def explain(path: Path, error: sqlite3.Error) -> LedgerError:
    """SQLite's error as one of ours, which names the file and the fix."""
    detail = str(error)
    if isinstance(error, sqlite3.OperationalError) and any(word in detail for word in ("full", "I/O", "readonly")):
        return LedgerError(
            f"cannot write to {path}: {detail}. Free some space, or make it writable, and continue with "
            "`loopwright resume`: nothing that was recorded is lost."
        )
    if any(word in detail for word in ("malformed", "not a database", "corrupt")):
        return LedgerError(damaged(path, detail))
    return LedgerError(f"{path}: {detail}")


def lock(file: Path, owner: str) -> int:
    """Lock a file beside a database that one process owns, for as long as the descriptor that it returns is open."""
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise OutputBusy(f"another {owner} uses {file.parent}. Stop it, or choose another --output.") from error
    return descriptor


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise SQLite's errors as ours."""
    try:
        yield
    except sqlite3.Error as error:
        raise explain(path, error) from error


class Chain:
    """Adds events to a ledger's checksum chain (`events.py`), inside its transactions and so under their lock.

    The number and the hash of the last event are also in a small file beside the ledger, the head. The order of writes
    makes sure that a crash never looks like damage: the head may lag behind the ledger, and the ledger never behind it.

    1. SQLite commits the rows and their events.
    2. A record with the boot id is written to the head through a memory map, which costs no system call. It survives
       `kill -9`, as the commit does.
    3. At most once a second, and on close: the write-ahead log is synced, then records without a boot id are written
       and the head is synced.

    After a power failure the file system may have stored 2 without 1, so a record with another boot id does not count.
    The records are written in turns: one that was cut in half leaves others.
    """

    def __init__(self, ledger: Path, connection: sqlite3.Connection, last: tuple[int, bytes] = (0, ORIGIN)) -> None:
        self.connection = connection
        self.last = self.committed = last
        """The number and the hash of the last event, and of the last one that was committed."""
        self._ledger, self._turn, self._synced_at = ledger, 0, -math.inf
        with storage(ledger):
            file = os.open(ledger.with_suffix(HEAD_SUFFIX), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                # A full disk must fail here, and not when the map is written.
                os.posix_fallocate(file, 0, _HEAD_BYTES)
                self._head = mmap.mmap(file, _HEAD_BYTES)
            finally:
                os.close(file)

    def add(self, kind: str, key: int, values: Sequence[Any], name: str = "") -> None:
        """Add an event to `events`; all its values are None if the row is gone."""
        number, hash = self.last = link(self.last, kind, key, name, values)
        self.connection.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", (number, kind, key, name, hash))

    def update(self, kind: str, statement: str, values: Sequence[Any]) -> list[int]:
        """Execute a statement that returns key, name and the new values of each row; gives the keys in order."""
        rows = self.connection.execute(statement, values).fetchall()
        for key, name, *row in rows:
            self.add(kind, key, row, str(name))
        return sorted(row[0] for row in rows)

    def add_batches(self, kind: str, rows: Sequence[Sequence[Any]]) -> None:
        """Add events for many new rows, in the order of their numbers, which come first in each row."""
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            self.add(kind, batch[0][0], batch, str(batch[-1][0]))

    def put_payload(self, number: int, kind: str, data: bytes) -> None:
        """Write a larger value of a trial."""
        self.connection.execute("INSERT OR REPLACE INTO payloads VALUES (?, ?, ?)", (number, kind, data))
        self.add("payload", number, (data,), kind)

    def publish(self, *, sync: bool = False) -> None:
        """Write the head, after a commit; once a second, and with `sync`, make the commit durable as well."""
        self.committed = self.last
        start = self._turn = _RECORD_BYTES - self._turn
        record = HEAD_RECORD.pack(*self.last, BOOT_ID)
        self._head[start : start + _RECORD_BYTES] = record + crc32(record).to_bytes(4)
        if not sync and time.monotonic() - self._synced_at < _SYNC_S:
            return
        with storage(self._ledger):
            # Without a log, SQLite synced all of it into the ledger when it removed it.
            with suppress(FileNotFoundError):
                log = os.open(f"{self._ledger}-wal", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(log)
                finally:
                    os.close(log)
            record = HEAD_RECORD.pack(*self.last, b"")
            for start in range(0, _HEAD_BYTES, _RECORD_BYTES):
                self._head[start : start + _RECORD_BYTES] = record + crc32(record).to_bytes(4)
            self._head.flush()
        self._synced_at = time.monotonic()

    def close(self) -> None:
        """Sync and close the head."""
        if not self._head.closed:
            try:
                self.publish(sync=True)
            finally:
                self._head.close()


def link(last: tuple[int, bytes], kind: str, key: int, name: str, values: Any) -> tuple[int, bytes]:
    """The number and the hash of the event after `last`. The values are those that SQLite returns."""
    data = last[1] + orjson.dumps((kind, key, name, values), lambda binary: blake2b(binary, digest_size=16).hexdigest())
    return last[0] + 1, blake2b(data, digest_size=16).digest()


class Transaction:
    """Writes under a lock: all of a transaction or nothing. A class, because this is the hot path.

    `with transaction:` commits at the end, together with everything held before it. `with transaction.held:` leaves the
    commit to the next writer, so that what belongs together costs one commit. `with transaction.single:` and `with
    transaction.held.single:` are the same for one statement: if it fails, SQLite itself undoes all of it.
    """

    single: "Transaction"
    held: "Transaction"

    def __init__(self, path: Path, connection: sqlite3.Connection, chain: Chain | None = None) -> None:
        self._path, self._connection, self._chain = path, connection, chain
        self._lock = threading.RLock()
        self._commits, self._saves, self._joins = True, True, False
        self._before: Any = None
        self.held, self.single = copy(self), copy(self)
        self.held._commits = self.single._saves = False
        self.held.single = copy(self.held)
        self.held.single._saves = False

    def __enter__(self) -> sqlite3.Connection:
        self._lock.acquire()
        try:
            self._joins = self._connection.in_transaction
            if not self._joins:
                self._connection.execute("BEGIN IMMEDIATE")
            elif self._saves:
                self._connection.execute("SAVEPOINT joined")
            self._before = None if self._chain is None else self._chain.last
        except sqlite3.Error as error:
            self._lock.release()
            raise explain(self._path, error) from error
        return self._connection

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        try:
            if error is not None:
                # Undo this part, and not what others hold. A full disk may have undone everything already.
                if self._connection.in_transaction and (self._saves or not self._joins):
                    self._connection.execute("ROLLBACK TO joined" if self._joins else "ROLLBACK")
                self._undo()
            elif self._commits:
                self._connection.execute("COMMIT")
                if self._chain is not None and self._chain.last is not self._chain.committed:
                    self._chain.publish()
            elif self._joins and self._saves:
                self._connection.execute("RELEASE joined")
        except sqlite3.Error as refused:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._undo()
            raise explain(self._path, refused) from refused
        finally:
            self._lock.release()
        if isinstance(error, sqlite3.Error):
            raise explain(self._path, error) from error

    def _undo(self) -> None:
        if self._chain is not None:
            self._chain.last = self._before if self._connection.in_transaction else self._chain.committed

    def flush(self) -> None:
        """Commit everything held."""
        if self._connection.in_transaction:
            with self.single:
                pass

    def rows(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """All rows of a query, read under the same lock."""
        with self._lock:
            try:
                return self._connection.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise explain(self._path, error) from error


def connect(path: Path, synchronous: str) -> sqlite3.Connection:
    """A connection for writing: explicit transactions, usable from several threads under a lock.

    It uses the write-ahead log, or a rollback journal on a network file system, where the log does not work.
    """
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=10)
    try:
        mode = "TRUNCATE" if file_system(path.parent).startswith(NETWORK) else "WAL"
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute(f"PRAGMA journal_mode = {mode}")
        # The last pages of a table change with every row: copied less often from the log, they cost less.
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def file_system(path: Path, mounts: Path | None = None) -> str:
    """The type of the file system of a path that exists, such as `ext4`; empty if it is unknown."""
    place, longest, kind = os.path.realpath(path), -1, ""
    try:
        lines = (mounts or MOUNTS).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        # Spaces inside a name are written as \\040.
        _, point, name, *_ = (word.replace("\\040", " ") for word in line.split(" "))
        if (place == point or place.startswith(f"{point.rstrip('/')}/")) and len(point) >= longest:
            longest, kind = len(point), name
    return kind


def connect_to_read(path: Path) -> sqlite3.Connection:
    """A connection for reading only, also while another process writes."""
    uri = path.absolute().as_uri()
    # Not mode=ro: the last one to close must be able to fold the write-ahead log into the file.
    connection = sqlite3.connect(f"{uri}?mode=rw", uri=True, check_same_thread=False, isolation_level=None)
    try:
        connection.execute("PRAGMA query_only = 1")
        connection.execute("SELECT 1 FROM sqlite_schema").fetchone()
    except sqlite3.OperationalError:
        # A read-only disk cannot hold the write-ahead index; nothing can be writing there either.
        connection.close()
        uri = f"{uri}?mode=ro&immutable=1"
        connection = sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def text(value: Any) -> str:
    """A value as JSON text; a value that JSON cannot hold is written as its repr."""
    try:
        return orjson.dumps(value, option=_OPTIONS, default=repr).decode()
    except TypeError:  # integers beyond 64 bits, strings that are not valid Unicode
        return orjson.dumps(_plain(value), option=_OPTIONS, default=repr).decode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_plain(name): _plain(item) for name, item in value.items()}
    try:
        orjson.dumps(value, option=_OPTIONS, default=repr)
    except TypeError:
        return repr(value)
    return value
