"""The checksum chain: every write to a ledger is an event, whose hash covers the one before it and what was written.

    hash(n) = blake2b(hash(n - 1), kind, key, name, the values of event n)

Number and hash are written in the same transaction as the values: of a reserved trial and of its result in the trial's
own row, which costs no further page, of everything else in `events`. An event replaces the earlier one with the same
kind, key and name; the last of them must agree with the ledger (`check.py`). The end of the chain is also in a small
file beside the ledger (`head.py`), which shows if the ledger itself was set back.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from loopwright.ledger.head import Head

CHAIN_SCHEMA = """
CREATE TABLE events (
    seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, key INTEGER NOT NULL, name TEXT NOT NULL, hash BLOB NOT NULL
) STRICT;
CREATE TRIGGER result_replaced AFTER UPDATE OF result_seq ON trials WHEN OLD.result_seq IS NOT NULL BEGIN
    INSERT INTO events VALUES (OLD.result_seq, 'replaced', OLD.number, '', OLD.result_hash);
END;
"""
ORIGIN = bytes(16)
"""The hash before the first event."""
RESERVED = "number, grp, repeat, action, key, draw, regime, reserved_at"
"""The values of the event `reserve`, columns of the trial."""
RESULT = "outcome, fault, reason, reward, reward_detail, metrics, usage, cached_from, finished_at"
"""The values of the event `result`, columns of the trial."""
_REAL = ("reward", "started_at", "ended_at", "finished_at")
BATCH = 256
"""How many live rows one event covers, so that damage is located without an event for each row."""


@dataclass(frozen=True, slots=True)
class EventKind:
    """Where the values of an event in `events` are stored, in SQL: `e` is the event, `r` the row."""

    table: str
    columns: str
    where: str
    identity: str
    """The event's key and name, from the row."""
    subject: str
    """What the event is about, for messages."""
    rows: str = "1"
    """Which rows of the table have such events."""
    many: bool = False
    """Whether an event covers several new rows, from the number `key` to the number `name`."""


KINDS: Mapping[str, EventKind] = {
    "payload": EventKind(
        "payloads",
        "data",
        "trial = e.key AND r.kind = e.name",
        "trial, r.kind",
        "the payload {name!r} of trial {key}",
        rows="r.kind <> 'episode'",
    ),
    "attempt": EventKind(
        "attempts",
        "handle, started_at, ended_at, outcome, reason",
        "trial = e.key AND attempt = CAST(e.name AS INTEGER)",
        "trial, attempt",
        "attempt {name} of trial {key}",
    ),
    "state": EventKind("state", "value", "r.name = e.name", "0, r.name", "the run's state {name!r}"),
    "group": EventKind("groups", "source, again, status, version, step", "grp = e.key", "grp, ''", "group {key}"),
    "step": EventKind(
        "steps", "at, numbers", "r.kind = e.name AND step = e.key", "step, r.kind", "step {key} ({name})"
    ),
    "live": EventKind(
        "trials",
        "number, grp, action, draw, regime, outcome, fault, reason, reward, reward_detail, metrics, reserved_at, "
        "finished_at",
        "number BETWEEN e.key AND CAST(e.name AS INTEGER) AND repeat = 0 AND r.key = ''",
        "number, number",
        "one of the trials {key} to {name}",
        rows="reserve_seq IS NULL",
        many=True,
    ),
    "episodes": EventKind(
        "payloads",
        "trial, data",
        "r.kind = 'episode' AND trial BETWEEN e.key AND CAST(e.name AS INTEGER)",
        "trial, trial",
        "an episode that ended in one of the trials {key} to {name}",
        rows="r.kind = 'episode'",
        many=True,
    ),
}


def link(previous: bytes, kind: str, key: int, name: str, values: Any) -> bytes:
    """The hash of an event."""
    # Binary values by their own hash.
    content = orjson.dumps((kind, key, name, values), default=lambda data: blake2b(data, digest_size=16).hexdigest())
    return blake2b(previous + content, digest_size=16).digest()


def returning(*columns: str) -> str:
    """The clause for these columns, with values as SELECT would give them."""
    # RETURNING gives the whole numbers of REAL columns as integers.
    names = ", ".join(columns).split(", ")
    return "RETURNING " + ", ".join(f"{name} + 0.0" if name in _REAL else name for name in names)


class Chain:
    """Adds events to the ledger's chain. Used inside the ledger's transactions, and so under their lock."""

    def __init__(self, connection: sqlite3.Connection, head: Head | None) -> None:
        self._connection, self._head = connection, head
        self.last = self._committed = last_event(connection)
        """The number and the hash of the last event."""

    def next(self, kind: str, key: int, values: Sequence[Any], name: str = "") -> tuple[int, bytes]:
        """The number and the hash of a new event, to be written with it. The values are those that SQLite returns."""
        count, hash = self.last
        self.last = count + 1, link(hash, kind, key, name, values)
        return self.last

    def add(self, kind: str, key: int, values: Sequence[Any], name: str = "") -> None:
        """Add an event to `events`; all its values are None if the row is gone."""
        seq, hash = self.next(kind, key, values, name)
        self._connection.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", (seq, kind, key, name, hash))

    def update(self, kind: str, statement: str, values: Sequence[Any]) -> list[int]:
        """Execute a statement that returns key, name and the new values of each row; gives the keys in order."""
        rows = self._connection.execute(statement, values).fetchall()
        for key, name, *row in rows:
            self.add(kind, key, row, str(name))
        return sorted(row[0] for row in rows)

    def update_results(self, statement: str, values: Sequence[Any]) -> None:
        """Execute an UPDATE of trials that changes their results."""
        for number, *row in self._connection.execute(f"{statement} {returning('number', RESULT)}", values).fetchall():
            self._connection.execute(
                "UPDATE trials SET result_seq = ?, result_hash = ? WHERE number = ?",
                (*self.next("result", number, row), number),
            )

    def add_batches(self, kind: str, rows: Sequence[Sequence[Any]]) -> None:
        """Add events for many new rows, in the order of their numbers, which come first in each row."""
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            self.add(kind, batch[0][0], batch, str(batch[-1][0]))

    def set_state(self, name: str, value: str) -> None:
        """Write a value of the run, as JSON."""
        self._connection.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (name, value))
        self.add("state", 0, (value,), name)

    def put_payload(self, number: int, kind: str, data: bytes) -> None:
        """Write a larger value of a trial."""
        self._connection.execute("INSERT OR REPLACE INTO payloads VALUES (?, ?, ?)", (number, kind, data))
        self.add("payload", number, (data,), kind)

    def publish(self) -> None:
        """Write the head beside the ledger, after a commit."""
        if self._head is not None and self.last is not self._committed:
            self._committed = self.last
            self._head.write(self.last)

    def undo(self) -> None:
        """Continue after the last commit, since everything else was rolled back."""
        self.last = self._committed

    def close(self) -> None:
        """Sync the head and close its file."""
        if self._head is not None:
            self._head.close()


def last_event(connection: sqlite3.Connection) -> tuple[int, bytes]:
    """The number and the hash of the last event; reads all trials."""
    # With max(), SQLite takes the other column from the row that has it.
    queries = (
        "SELECT max(seq), hash FROM events",
        "SELECT max(reserve_seq), reserve_hash FROM trials",
        "SELECT max(result_seq), result_hash FROM trials",
    )
    events = [row for query in queries if (row := connection.execute(query).fetchone())[0] is not None]
    return max(events, default=(0, ORIGIN))
