"""The checksum chain: every write to a ledger is an event, whose hash covers the one before it and what was written.

    hash(n) = blake2b(hash(n - 1), kind, key, name, the values of event n)

Number and hash are written in the same transaction as the values: of a reserved trial, of its result and of its first
attempt in their own rows, which costs no further page, of everything else in `events`. An event replaces the earlier
one with the same kind, key and name; the last of them must agree with the ledger (`check.py`). The end of the chain is
also in a small file beside the ledger, which shows if the ledger itself was set back (`sqlite.py`, which also writes
the events).
"""

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

from loopwright.ledger.sqlite import ORIGIN

EVENTS_SCHEMA = """
CREATE TABLE events (
    seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, key INTEGER NOT NULL, name TEXT NOT NULL, hash BLOB NOT NULL
) STRICT;
CREATE VIEW recorded AS SELECT seq, kind, key, name, hash FROM events UNION ALL
SELECT seq, 'attempt', trial, CAST(attempt AS TEXT), hash FROM attempts WHERE seq IS NOT NULL;
"""
"""`recorded` has all events but those of trials."""
RESERVED = "number, grp, repeat, action, key, draw, regime, noise, phase, reserved_at"
"""The values of the event `reserve`, columns of the trial."""
RESULT = "outcome, fault, reason, reward, reward_detail, metrics, usage, cached_from, finished_at"
"""The values of the event `result`, columns of the trial."""
KEEP_RESULTS = (
    "INSERT INTO events SELECT result_seq, 'replaced', number, '', result_hash FROM trials WHERE result_seq IS NOT NULL"
)
"""Keeps the event of a trial's result, which is about to be replaced, in the chain; conditions are added."""
SET_STATE = "INSERT OR REPLACE INTO state VALUES (?, ?)"
_REAL = ("reward", "started_at", "ended_at", "finished_at")


@dataclass(frozen=True, slots=True)
class EventKind:
    """Where the values of a recorded event are stored, in SQL: `e` is the event, `r` the row."""

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


def returning(*columns: str) -> str:
    """The clause for these columns, with values as SELECT would give them."""
    # RETURNING gives the whole numbers of REAL columns as integers.
    names = ", ".join(columns).split(", ")
    return "RETURNING " + ", ".join(f"{name} + 0.0" if name in _REAL else name for name in names)


def last_event(connection: sqlite3.Connection) -> tuple[int, bytes]:
    """The number and the hash of the last event; reads all trials."""
    # With max(), SQLite takes the other column from the row that has it.
    queries = (
        "SELECT max(seq), hash FROM recorded",
        "SELECT max(reserve_seq), reserve_hash FROM trials",
        "SELECT max(result_seq), result_hash FROM trials",
    )
    events = [row for query in queries if (row := connection.execute(query).fetchone())[0] is not None]
    return max(events, default=(0, ORIGIN))
