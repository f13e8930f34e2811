"""The store: sessions, their nodes and their calls, on disk before a client sees them.

It is a SQLite file, like a ledger. All waiting writes are committed together. The event loop commits small ones itself:
that takes less time than to wake a thread and to be woken by it. A thread commits large ones, and everything while the
disk is slow. Another one makes the checkpoints, which wait for the disk, while calls continue.
"""

import asyncio
import json
import math
import os
import queue
import sqlite3
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import chain, count
from pathlib import Path
from typing import Any

import orjson

from loopwright.core.episode import Node, Span
from loopwright.core.errors import LedgerError, storage
from loopwright.engines.base import Sampling
from loopwright.gateway.sessions.graph import Key, key_of
from loopwright.ledger.sqlite import Transaction, connect, explained, lock

VERSION = 7
_SCHEMA = """
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, key TEXT NOT NULL, config TEXT NOT NULL,
    opened_at REAL NOT NULL, status TEXT NOT NULL, closed_at REAL, outcome TEXT NOT NULL,
    reason TEXT NOT NULL, snapshot TEXT NOT NULL
) STRICT;
CREATE TABLE nodes (
    session INTEGER NOT NULL, number INTEGER NOT NULL, parent INTEGER NOT NULL, key TEXT, message TEXT NOT NULL,
    ids BLOB NOT NULL, logprobs BLOB NOT NULL, spans TEXT NOT NULL, finish TEXT,
    is_delivered INTEGER NOT NULL DEFAULT 1, call TEXT, choice INTEGER, digest BLOB, dialect TEXT, sampling TEXT,
    seed TEXT, begun_at REAL, verdict TEXT, reason TEXT, token INTEGER, options TEXT, ended_at REAL, failure TEXT,
    failed_at INTEGER, PRIMARY KEY (session, number)
) STRICT;
CREATE TABLE objects (session INTEGER NOT NULL, id TEXT NOT NULL, data TEXT NOT NULL, PRIMARY KEY (session, id)) STRICT;
"""
"""A turn's call, and how it ended, are columns of its node: every table more has an index that costs a page.

Other tables know a session by its number: with its id, their indexes would be several times as large.
"""

# Each for one row; `_merge` merges several rows into one statement.
NODE = "INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?{})"
INTENT = NODE.format(", ?" * 11 + ", NULL" * 3)
"""The node of a turn and its call, before anything is sampled; or again, before a call continues."""
NODE = NODE.format(", NULL" * 14)
RESULT = (  # not a replacement, which would write the index again
    "UPDATE nodes SET key = ?, message = ?, ids = ?, logprobs = ?, spans = ?, finish = ?, is_delivered = ?, "
    "ended_at = ?, failure = ?, failed_at = ? WHERE session = ? AND number = ?"
)
_RESULTS = (  # for a single row it takes ten times as long
    "UPDATE nodes SET key = result.column1, message = result.column2, ids = result.column3, "
    "logprobs = result.column4, spans = result.column5, finish = result.column6, is_delivered = result.column7, "
    "ended_at = result.column8, failure = result.column9, failed_at = result.column10 "
    "FROM (VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)) AS result "
    "WHERE session = result.column11 AND number = result.column12"
)
_IDS = {NODE: 5, INTENT: 5, RESULT: 2}
"""Which of their values are token ids."""
OBJECT = "INSERT OR REPLACE INTO objects VALUES (?, ?, ?)"
"""A conversation that the client opened, as JSON; empty for a deleted conversation or response."""
SESSION = "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_MAX_ROWS = 32
"""Rows of one statement."""

Statement = tuple[str, tuple[Any, ...]]
_Write = tuple[Sequence[Statement], asyncio.Future[None]]
_packer = lru_cache(1024)(struct.Struct)
"""Converts numbers without copying their tuple first; an array takes several times as long."""
Query = Callable[[str, tuple[Any, ...]], list[Any]]
"""Runs a query; returns its rows."""

PROBE: Sequence[Statement] = (
    ("INSERT INTO sessions VALUES (0, '/', '', '', 0.0, '', NULL, '', '', '')", ()),
    ("DELETE FROM sessions WHERE id = '/'", ()),
)
"""Changes nothing, but shows whether the store can be written."""
_PAGE_BYTES = 4096
_PAGES_BYTES = 2**16
"""What a write takes besides its data."""
_ROW_BYTES, _ID_BYTES = 2**12, 3
"""About what a row takes in the log: a page, and for each byte of its token ids as much for logprobs and text."""
_MAX_QUICK_BYTES = 2**21
"""What the event loop commits at once, at most; it takes about a millisecond."""
_SLOW_S, _MIN_REST_S, _MAX_REST_S = 0.01, 0.05, 2.0
"""After a commit that took this long, the thread commits everything for a while: longer each time it happens again."""
_CHECKPOINT_BYTES, _MAX_LOG_BYTES = 2**24, 2**25
"""How much is logged between checkpoints, and when all calls wait for one: only then can the log start again."""


class DiskStore:
    """A file in the output directory. It contains the keys of the sessions, so only its owner can read it."""

    def __init__(self, output: Path) -> None:
        self.path = output / "gateway.db"
        with storage(output):
            output.mkdir(parents=True, exist_ok=True)
            self._lock = lock(output / "gateway.lock", "gateway")
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        with explained(self.path):
            self._connection = connect(self.path, "NORMAL")
            self._connection.execute("PRAGMA wal_autocheckpoint = 0")
            (version,) = self._connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
            else:
                check_version(self.path, version)
            quick_connection = connect(self.path, "NORMAL")
            # The event loop does not wait for others that write, such as a user's `sqlite3`.
            quick_connection.executescript("PRAGMA wal_autocheckpoint = 0; PRAGMA busy_timeout = 0;")
            self._checkpoint_connection = connect(self.path, "NORMAL")
        self.connections = (quick_connection, self._connection)
        """That of the event loop, and that of the thread."""
        self._transaction = Transaction(self.path, self._connection)
        self._quick_transaction = Transaction(self.path, quick_connection)
        ((last,),) = self.rows("SELECT coalesce(max(number), 0) FROM sessions")
        self.session_numbers = count(last + 1)
        """The numbers of new sessions."""
        self._failed_bytes = 0
        """The size of the last write, if it failed for want of disk or for another reason."""
        self._loop = asyncio.get_running_loop()
        self._waiting: list[_Write] = []
        """Writes of this iteration of the event loop."""
        self.calls = 0
        """Calls at work. The writes of a single one are committed at once: they need not wait for others."""
        self._thread_batches = self._log_bytes = 0
        # Without the log, on a network file system, every commit waits for the disk.
        (journal,) = self._connection.execute("PRAGMA journal_mode").fetchone()
        self._quick_after_s, self._rest_s = -math.inf if journal == "wal" else math.inf, _MIN_REST_S
        self._queue: queue.SimpleQueue[Sequence[_Write] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="gateway-store", daemon=True)
        self._thread.start()
        self._checkpointer: threading.Thread | None = None

    def write(self, statements: Sequence[Statement]) -> asyncio.Future[None]:
        """Write all statements or none; done once they are committed. StorageError if they cannot be.

        Cancelling the future does not cancel the write.
        """
        done = self._loop.create_future()
        self._waiting.append((statements, done))
        if self.calls == 1:
            self._write_waiting()
        elif len(self._waiting) == 1:
            self._loop.call_soon(self._write_waiting)
        return done

    async def check(self) -> None:
        """StorageError if it cannot be written now. What failed last must fit: small writes may still succeed."""
        await self.write(PROBE)
        if self._failed_bytes:
            await asyncio.to_thread(self._allocate, 2 * self._failed_bytes + _PAGES_BYTES)

    def _allocate(self, size: int) -> None:
        path = self.path.with_name("gateway.probe")
        with storage(path):
            file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(file, 0, size)
            finally:
                os.close(file)
                path.unlink()

    def rows(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """The rows of a query."""
        return self._transaction.rows(query, values)

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._write_waiting()
        self._queue.put(None)
        self._thread.join()
        self._wait_for_checkpoint()
        for connection in (*self.connections, self._checkpoint_connection):
            connection.close()
        os.close(self._lock)

    @property
    def queue_length(self) -> int:
        """How many writes are waiting."""
        return len(self._waiting) + self._queue.qsize()

    def _write_waiting(self) -> None:
        """Commit what waits, or hand it to the thread."""
        jobs, self._waiting = self._waiting, []
        if not jobs:  # they were committed with those of a single call
            return
        size = sum(
            _ROW_BYTES + (_ID_BYTES * len(values[at]) if (at := _IDS.get(query)) else 0)
            for statements, _ in jobs
            for query, values in statements
        )
        self._log_bytes += size
        start_s = time.perf_counter()
        is_quick = size <= _MAX_QUICK_BYTES and start_s >= self._quick_after_s
        if is_quick and not self._thread_batches and not self._failed_bytes:
            try:
                with self._quick_transaction as connection:
                    for query, rows in _group(jobs):
                        connection.executemany(query, rows)
            except Exception:  # noqa: BLE001  the thread tries again, and reports it
                self._hand_over(jobs)
            else:
                _resolve([done for _, done in jobs])
                if (end_s := time.perf_counter()) - start_s <= _SLOW_S:
                    self._rest_s = _MIN_REST_S
                else:
                    self._quick_after_s = end_s + self._rest_s
                    self._rest_s = min(2 * self._rest_s, _MAX_REST_S)
        else:
            self._hand_over(jobs)
        if self._log_bytes >= _CHECKPOINT_BYTES and (self._checkpointer is None or not self._checkpointer.is_alive()):
            self._log_bytes = 0
            self._checkpointer = threading.Thread(target=self._checkpoint, name="gateway-checkpoint", daemon=True)
            self._checkpointer.start()
        elif self._log_bytes >= _MAX_LOG_BYTES:  # the checkpoint takes longer than all these writes
            self._log_bytes = 0
            self._hand_over(())

    def _hand_over(self, jobs: Sequence[_Write]) -> None:
        """Let the thread commit them; without any, it makes a checkpoint, for which all calls wait."""
        self._thread_batches += 1
        self._queue.put(jobs)

    def _checkpoint(self) -> None:
        """Copy the log into the file while calls continue, so that what they log meanwhile remains."""
        with suppress(sqlite3.Error):  # the next one does what this one missed
            _, pages, copied = self._checkpoint_connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if pages > copied and pages * _PAGE_BYTES > _MAX_LOG_BYTES:
                self._loop.call_soon_threadsafe(self._hand_over, ())

    def _wait_for_checkpoint(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.join()

    def _work(self) -> None:
        more = True
        while more:
            batches = [self._queue.get()]
            while not self._queue.empty():
                batches.append(self._queue.get())
            more = None not in batches
            jobs = [job for batch in batches if batch is not None for job in batch]
            failure: Exception | None = None
            try:
                with self._transaction as connection:
                    for query, rows in _group(jobs):
                        for merged, values in _merge(query, rows):
                            connection.execute(merged, values)
            except Exception as error:  # noqa: BLE001  raised to those who await the writes
                failure = error
            if failure is not None or self._failed_bytes:
                rows = [values for statements, _ in jobs for _, values in statements]
                size = sum(len(value) for values in rows for value in values if isinstance(value, str | bytes))
                if size:  # or it was a probe, which says nothing about larger writes
                    self._failed_bytes = size if failure is not None else 0
            if () in batches:
                self._wait_for_checkpoint()
                with suppress(sqlite3.Error):
                    self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
            # Once for all of them: waking the event loop costs more than resolving a future.
            self._loop.call_soon_threadsafe(self._finish, len(batches), [done for _, done in jobs], failure)

    def _finish(self, batches: int, futures: Sequence[asyncio.Future[None]], failure: Exception | None) -> None:
        self._thread_batches -= batches
        _resolve(futures, failure)


def _resolve(futures: Sequence[asyncio.Future[None]], failure: Exception | None = None) -> None:
    for future in futures:
        if future.done():  # no longer awaited
            continue
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(failure)
            future.exception()  # so that asyncio does not log it as never retrieved


def _group(jobs: Iterable[_Write]) -> Iterable[tuple[str, Sequence[tuple[Any, ...]]]]:
    """The rows of each query, unless the order between queries matters."""
    statements = [each for statements, _ in jobs for each in statements]
    groups: dict[str, list[tuple[Any, ...]]] = {query: [] for query in (NODE, INTENT, RESULT)}
    results = set()
    for query, values in statements:
        # The intent of a call that starts again must follow the result of its first run.
        if query not in groups or (query is INTENT and values[:2] in results):
            return [(query, [values]) for query, values in statements]
        if query is RESULT:
            results.add(values[-2:])
        groups[query].append(values)
    return groups.items()


def _merge(query: str, rows: Sequence[tuple[Any, ...]]) -> Iterable[Statement]:
    """Rows as fewer statements: powers of two at a time, of which SQLite keeps the few that there are prepared.

    After each statement the thread waits for the interpreter lock, which costs more than writing a row. The event loop
    holds it already.
    """
    start = 0
    while left := len(rows) - start:
        count = min(_MAX_ROWS, 1 << (left.bit_length() - 1))
        merged = _query(query, count) if count > 1 else query
        yield merged, tuple(chain.from_iterable(rows[start : start + count]))
        start += count


@cache
def _query(query: str, count: int) -> str:
    query = _RESULTS if query is RESULT else query
    start = query.index("(?")
    row = query[start : query.index(")", start) + 1]
    return query.replace(row, ", ".join([row] * count))


def delete_statements(session: int) -> list[Statement]:
    """Statements that delete everything about a session."""
    tables = (("sessions", "number"), ("nodes", "session"), ("objects", "session"))
    return [(f"DELETE FROM {table} WHERE {column} = ?", (session,)) for table, column in tables]


def truncate_statements(session: int, first: int) -> list[Statement]:
    """Statements that delete the nodes of a session from this number on."""
    return [("DELETE FROM nodes WHERE session = ? AND number >= ?", (session, first))]


def check_version(path: Path, version: int) -> None:
    """LedgerError unless a store has the format that is read here."""
    if version != VERSION:
        raise LedgerError(
            f"{path} has format {version}, and this Loopwright reads {VERSION}. Use the Loopwright that wrote it, or "
            "start in another --output."
        )


# -- nodes as rows ----------------------------------------------------------------------------------------------------


def node_row(session: int, number: int, node: Node, key: Key | None) -> tuple[Any, ...]:
    """A node as the values of `NODE`. A key that follows from the message is stored empty, as are zeros as logprobs."""
    logprobs = node.logprobs if node.spans else ()
    return (
        session,
        number,
        node.parent or 0,
        None if key is None else json.dumps(key) if key[2] else "",
        orjson.dumps(node.message).decode(),
        _packer(f"{len(node.ids)}q").pack(*node.ids),
        _packer(f"{len(logprobs)}d").pack(*logprobs),
        orjson.dumps([(span.start, span.stop, span.version) for span in node.spans]).decode(),
        node.finish,
        node.is_delivered,
    )


GAP = Node(0, {"role": "lost", "content": ""})
"""Stands for a node that could not be written, where later ones could."""


def load_nodes(query: Query, session: int) -> list[tuple[Node, Key | None]]:
    """The nodes of a session below the root, in order, and the keys of those that can be found again."""
    rows = query(
        "SELECT number, parent, key, message, ids, logprobs, spans, finish, is_delivered, sampling FROM nodes "
        "WHERE session = ? ORDER BY number",
        (session,),
    )
    nodes: list[tuple[Node, Key | None]] = []
    for number, parent, key, message_json, ids, logprobs, spans_json, finish, is_delivered, sampling in rows:
        nodes += [(GAP, None)] * (number - 1 - len(nodes))
        message, spans = orjson.loads(message_json), tuple(Span(*span) for span in orjson.loads(spans_json))
        reshapes = {} if sampling is None else Sampling.model_validate_json(sampling).reshapes
        tokens = _numbers("q", ids)
        values = _numbers("d", logprobs) if spans else (0.0,) * len(tokens)
        node = Node(parent, message, tokens, values, spans, finish, reshapes, bool(is_delivered))
        stored_key: Key | None = None
        if key is not None:
            stored_key = tuple(json.loads(key)) if key else key_of(message)
        nodes.append((node, stored_key))
    return nodes


def _numbers(kind: str, data: bytes) -> tuple[Any, ...]:
    numbers = array(kind)
    numbers.frombytes(data)
    return tuple(numbers)
