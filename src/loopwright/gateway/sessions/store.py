"""The store: sessions, their nodes and their calls, on disk before anybody is told.

One thread writes; whatever waits for it is committed together, off the event loop. It is a SQLite file, like a ledger.
"""

import asyncio
import fcntl
import json
import os
import queue
import struct
import threading
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import orjson

from loopwright.core.episode import Node, Span
from loopwright.core.errors import LedgerError, OutputBusy, storage
from loopwright.engines.base import Sampling
from loopwright.gateway.sessions.graph import Key, key_of
from loopwright.ledger.sqlite import Transaction, connect, explained

VERSION = 3
_SCHEMA = """
CREATE TABLE sessions (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, terms TEXT NOT NULL, opened_at REAL NOT NULL, status TEXT NOT NULL,
    closed_at REAL, outcome TEXT NOT NULL, reason TEXT NOT NULL, snapshot TEXT NOT NULL
) STRICT;
CREATE TABLE nodes (
    session TEXT NOT NULL, number INTEGER NOT NULL, parent INTEGER NOT NULL, key TEXT, message TEXT NOT NULL,
    ids BLOB NOT NULL, logprobs BLOB NOT NULL, spans TEXT NOT NULL, finish TEXT, PRIMARY KEY (session, number)
) STRICT;
CREATE TABLE calls (
    session TEXT NOT NULL, node INTEGER NOT NULL, call TEXT NOT NULL, choice INTEGER NOT NULL, digest BLOB NOT NULL,
    dialect TEXT NOT NULL, sampling TEXT NOT NULL, seed TEXT NOT NULL, begun_at REAL NOT NULL, ended_at REAL,
    verdict TEXT NOT NULL, reason TEXT NOT NULL, token INTEGER, manner TEXT NOT NULL, failure TEXT, failed_at INTEGER,
    PRIMARY KEY (session, node)
) STRICT;
"""
# Where a turn failed, that once took the place of what its prompt was worth.
_FROM_2 = """
ALTER TABLE calls ADD COLUMN failure TEXT;
ALTER TABLE calls ADD COLUMN failed_at INTEGER;
UPDATE calls SET failure = reason, failed_at = token, verdict = 'exact', reason = '', token = NULL
WHERE verdict = 'broken';
"""

# Each with one row; `_grouped` makes one statement of several rows.
NODE = "INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
INTENT = "INSERT OR REPLACE INTO calls VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, ?, ?, ?, ?, NULL, NULL)"
RESULT = (
    "UPDATE calls SET ended_at = told.column1, failure = told.column2, failed_at = told.column3 "
    "FROM (VALUES (?, ?, ?, ?, ?)) AS told WHERE session = told.column4 AND node = told.column5"
)
_ROWS = 32
"""The most rows of a statement."""

Statement = tuple[str, tuple[Any, ...]]

PROBE: Sequence[Statement] = (
    ("INSERT INTO sessions VALUES ('/', '', '', 0.0, '', NULL, '', '', '')", ()),
    ("DELETE FROM sessions WHERE id = '/'", ()),
)
"""What changes nothing, and is written all the same: whether it can be is the question."""


class Source(Protocol):
    """Where sessions are read from."""

    def rows(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """What a query gives."""
        ...


class Store(Source, Protocol):
    """Where sessions are kept."""

    def write(self, statements: Sequence[Statement]) -> asyncio.Future[None]:
        """Write all of it or nothing, whoever still waits; done once it is safe. StorageError if it cannot be."""
        ...

    def close(self) -> None:
        """Write what waits, and let go."""
        ...

    @property
    def waiting(self) -> int:
        """How many writes wait."""
        ...


class NoStore:
    """Keeps nothing: sessions live as long as the gateway."""

    def write(self, statements: Sequence[Statement]) -> asyncio.Future[None]:
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def rows(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        return []

    def close(self) -> None: ...

    waiting = 0


class DiskStore:
    """A file in the output directory, which only its owner can read: it holds the keys of the sessions."""

    def __init__(self, output: Path) -> None:
        self.path = output / "gateway.db"
        with storage(output):
            output.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(output)
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        with explained(self.path):
            self._connection = connect(self.path, "NORMAL")
            # Moving the log into the file waits for the disk, and all calls with it: so rather seldom (16 MB).
            self._connection.execute("PRAGMA wal_autocheckpoint = 4096")
            (version,) = self._connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._make(_SCHEMA)
            elif version == 2:
                self._make(_FROM_2)
            elif version != VERSION:
                raise LedgerError(
                    f"{self.path} has format {version}, and this Loopwright reads {VERSION}. Choose another --output."
                )
        self._transaction = Transaction(self.path, self._connection)
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[tuple[Sequence[Statement], asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="gateway-store", daemon=True)
        self._thread.start()

    def _make(self, tables: str) -> None:
        self._connection.executescript(f"BEGIN IMMEDIATE; {tables} PRAGMA user_version = {VERSION}; COMMIT;")

    def write(self, statements: Sequence[Statement]) -> asyncio.Future[None]:
        done = self._loop.create_future()
        self._queue.put((statements, done))
        return done

    def rows(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        return self._transaction.rows(query, values)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._connection.close()
        os.close(self._lock)

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    def _work(self) -> None:
        more = True
        while more:
            batch = [self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get())
            more = None not in batch
            jobs = [job for job in batch if job is not None]
            failed: Exception | None = None
            try:
                with self._transaction as connection:
                    for query, values in _grouped([each for statements, _ in jobs for each in statements]):
                        connection.execute(query, values)
            except Exception as error:  # noqa: BLE001  whoever waits is told
                failed = error
            # Once for all of them: waking the event loop costs more than telling one of them.
            self._loop.call_soon_threadsafe(_settle, [done for _, done in jobs], failed)


def _settle(waiting: Sequence[asyncio.Future[None]], failed: Exception | None) -> None:
    for done in waiting:
        if done.done():  # nobody waits any more
            continue
        if failed is None:
            done.set_result(None)
        else:
            done.set_exception(failed)
            done.exception()  # asyncio is not to complain if nobody asks


def _grouped(statements: Sequence[Statement]) -> Iterable[Statement]:
    """Statements of many rows each; but one by one where the order between queries counts.

    After every statement the thread has to wait for its turn to run Python, which costs more than writing the row.
    """
    groups: dict[str, list[tuple[Any, ...]]] = {query: [] for query in (NODE, INTENT, RESULT)}
    ended = set()
    for query, values in statements:
        # A call that was given up, and has begun again, has not ended.
        if query not in groups or (query is INTENT and values[:2] in ended):
            return statements
        if query is RESULT:
            ended.add(values[3:])
        groups[query].append(values)
    return [made for query, rows in groups.items() for made in _merged(query, rows)]


def _merged(query: str, rows: Sequence[tuple[Any, ...]]) -> Iterable[Statement]:
    """Powers of two of them at once: few statements, which SQLite keeps prepared."""
    begun = 0
    while left := len(rows) - begun:
        count = min(_ROWS, 1 << (left.bit_length() - 1))
        yield _query(query, count), tuple(chain.from_iterable(rows[begun : begun + count]))
        begun += count


@cache
def _query(query: str, count: int) -> str:
    begun = query.index("(?")
    row = query[begun : query.index(")", begun) + 1]
    return query.replace(row, ", ".join([row] * count))


def forgotten(session: str) -> list[Statement]:
    """How all that is known of a session is deleted."""
    tables = (("sessions", "id"), ("nodes", "session"), ("calls", "session"))
    return [(f"DELETE FROM {table} WHERE {column} = ?", (session,)) for table, column in tables]


async def written(store: Store, statements: Sequence[Statement]) -> None:
    """Wait until it is safe. Being cancelled meanwhile does not undo it."""
    await store.write(statements)


def _locked(output: Path) -> int:
    lock = os.open(output / "gateway.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise OutputBusy(f"another gateway works in {output}. End it, or choose another --output.") from error
    return lock


# -- nodes as rows ----------------------------------------------------------------------------------------------------


def node_statement(session: str, number: int, node: Node, key: Key | None) -> Statement:
    """How a node is written; one that has grown is written anew. A key that its message tells is left empty."""
    return NODE, (
        session,
        number,
        node.parent or 0,
        None if key is None else json.dumps(key) if key[2] else "",
        orjson.dumps(node.message).decode(),
        array("q", node.ids).tobytes(),
        struct.pack(f"{len(node.logprobs)}d", *node.logprobs),
        orjson.dumps([(span.start, span.stop, span.version) for span in node.spans]).decode(),
        node.finish,
    )


GAP = Node(0, {"role": "lost", "content": ""})
"""A node that could not be written, where later ones could."""


def nodes_of(store: Source, session: str) -> list[tuple[Node, Key | None]]:
    """The nodes of a session below the root, in order, and the keys of those that can be found again."""
    query = (
        "SELECT number, parent, key, message, ids, logprobs, spans, finish, sampling FROM nodes LEFT JOIN calls "
        "ON calls.session = nodes.session AND node = number WHERE nodes.session = ? ORDER BY number"
    )
    found: list[tuple[Node, Key | None]] = []
    for number, *row in store.rows(query, (session,)):
        found += [(GAP, None)] * (number - 1 - len(found))
        found.append(_node(row))
    return found


def _node(row: Iterable[Any]) -> tuple[Node, Key | None]:
    parent, key, text, ids, logprobs, spans, finish, sampling = row
    message, read = orjson.loads(text), tuple(Span(*span) for span in orjson.loads(spans))
    reshapes = {} if sampling is None else Sampling.model_validate_json(sampling).reshapes
    node = Node(parent, message, _numbers("q", ids), _numbers("d", logprobs), read, finish, reshapes)
    if key is None:
        return node, None
    return node, tuple(json.loads(key)) if key else key_of(message)


def _numbers(kind: str, data: bytes) -> tuple[Any, ...]:
    numbers = array(kind)
    numbers.frombytes(data)
    return tuple(numbers)
