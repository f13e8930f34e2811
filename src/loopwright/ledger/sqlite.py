"""SQLite as we use it: write-ahead log, explicit transactions, errors that name the fix."""

import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import orjson

from loopwright.core.errors import LedgerError

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


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


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise SQLite's errors as ours."""
    try:
        yield
    except sqlite3.Error as error:
        raise explain(path, error) from error


class CommitLog(Protocol):
    """What grows with a transaction and is undone with it, under its lock."""

    last: Any

    def publish(self) -> None:
        """Everything up to `last` is committed."""

    def undo(self) -> None:
        """Everything after the last commit is undone."""


class Transaction:
    """Writes under a lock: all of a transaction or nothing. A class, because this is the hot path.

    `with transaction:` commits at the end, together with everything held before it. `with transaction.held:` leaves the
    commit to the next writer, so that what belongs together costs one commit.
    """

    def __init__(
        self, path: Path, connection: sqlite3.Connection, held_lock: Any = None, chain: CommitLog | None = None
    ) -> None:
        self._path, self._connection, self._joins, self._chain = path, connection, False, chain
        self._before: Any = None
        self._commits, self._lock = held_lock is None, held_lock or threading.RLock()
        if held_lock is None:
            self.held = Transaction(path, connection, self._lock, chain)

    def __enter__(self) -> sqlite3.Connection:
        self._lock.acquire()
        try:
            self._joins = self._connection.in_transaction
            self._connection.execute("SAVEPOINT joined" if self._joins else "BEGIN IMMEDIATE")
            self._before = None if self._chain is None else self._chain.last
        except sqlite3.Error as error:
            self._lock.release()
            raise explain(self._path, error) from error
        return self._connection

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        try:
            if error is not None:
                # Undo this part, and not what others hold. A full disk may have undone everything already.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK TO joined" if self._joins else "ROLLBACK")
                self._undo()
            elif self._commits:
                self._connection.execute("COMMIT")
                if self._chain is not None:
                    self._chain.publish()
            elif self._joins:
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
        if self._chain is None:
            return
        if self._connection.in_transaction:
            self._chain.last = self._before
        else:
            self._chain.undo()

    def flush(self) -> None:
        """Commit everything held."""
        if self._connection.in_transaction:
            with self:
                pass

    def rows(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """All rows of a query, read under the same lock."""
        with self._lock:
            try:
                return self._connection.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise explain(self._path, error) from error


def connect(path: Path, synchronous: str) -> sqlite3.Connection:
    """A connection for writing: WAL, explicit transactions, usable from several threads under a lock."""
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=10)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


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
