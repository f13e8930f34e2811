"""The queue: accepted trials and their results, in a SQLite file that survives restarts of the server.

A trial is `queued`, then `running`, perhaps `cancelling`, and finally `ended` (with a result), `cancelled` or `lost`
(without one).
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loopwright.core.errors import LedgerError, storage
from loopwright.gateway.refusal import Refusal
from loopwright.ledger.sqlite import Transaction, connect, explained, lock
from loopwright.rollouts.trial_server.submission import is_id, trial_id

VERSION = 1
ATTEMPTS = 2
"""How often a trial is started whose server was killed."""
_SCHEMA = """
CREATE TABLE trials (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, digest BLOB NOT NULL, body BLOB NOT NULL,
    status TEXT NOT NULL, attempts INTEGER NOT NULL, submitted_at REAL NOT NULL, started_at REAL, ended_at REAL,
    reason TEXT NOT NULL, result BLOB
) STRICT;
CREATE INDEX trials_by_status ON trials (status, number);
CREATE INDEX trials_by_end ON trials (ended_at) WHERE ended_at IS NOT NULL;
CREATE TABLE artifacts (
    trial TEXT NOT NULL, name TEXT NOT NULL, data BLOB NOT NULL, PRIMARY KEY (trial, name)
) STRICT;
"""
_COLUMNS = "id, status, attempts, submitted_at, started_at, ended_at, reason"
FINAL = ("ended", "cancelled", "lost")
STATUSES = ("queued", "running", "cancelling", *FINAL)


@dataclass(frozen=True, slots=True)
class TrialEntry:
    """The state of a trial."""

    id: str
    status: str
    attempts: int
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    reason: str

    @property
    def is_final(self) -> bool:
        """Whether its status will not change any more."""
        return self.status in FINAL

    def as_json(self) -> dict[str, Any]:
        """The entry as plain data."""
        return asdict(self)


class TrialQueue:
    """Trials in the order of submission. Only the user can read the file, which contains tokens of gateways."""

    def __init__(self, output: Path, *, max_queued: int = 1000, clock: Callable[[], float] = time.time) -> None:
        self._max_queued, self._clock = max_queued, clock
        self.path = output / "trials.db"
        with storage(output, then="nothing was started"):
            output.mkdir(parents=True, exist_ok=True)
            self._lock = lock(output / "trials.lock", "trial server")
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        with explained(self.path):
            self._connection = connect(self.path, "NORMAL")
            self._connection.execute("PRAGMA secure_delete = ON")  # deleted data is overwritten
            (version,) = self._connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
            elif version != VERSION:
                raise LedgerError(
                    f"{self.path} has format {version}, but this Loopwright reads {VERSION}. Choose another --output."
                )
        self._transaction = Transaction(self.path, self._connection)

    # -- submitting ---------------------------------------------------------------------------------------------

    def add(self, key: str, digest: bytes, body: bytes) -> TrialEntry:
        """Queue a trial, or return the existing one with this key. Refusal if that one has another digest."""
        id = trial_id(key)
        with self._transaction as connection:
            existing = connection.execute("SELECT digest FROM trials WHERE id = ?", (id,)).fetchone()
            if existing is None:
                (waiting,) = connection.execute("SELECT count(*) FROM trials WHERE status = 'queued'").fetchone()
                if waiting >= self._max_queued:
                    raise Refusal(429, "full", f"{waiting} trials are queued already; try again later")
                row = (id, digest, body, self._clock())
                columns = "id, digest, body, submitted_at, status, attempts, reason"
                connection.execute(f"INSERT INTO trials ({columns}) VALUES (?, ?, ?, ?, 'queued', 0, '')", row)
            elif existing[0] not in (digest, b""):  # the digest is empty if it was cancelled before it was submitted
                raise Refusal(409, "conflict", "this key belongs to a trial with other contents", retry=False)
        return self.find(id)

    def claim(self) -> tuple[TrialEntry, bytes] | None:
        """Take the oldest queued trial, which is `running` from now on; its entry and its submission."""
        with self._transaction as connection:
            row = connection.execute(
                "UPDATE trials SET status = 'running', attempts = attempts + 1, started_at = ? WHERE number = (SELECT "
                f"number FROM trials WHERE status = 'queued' ORDER BY number LIMIT 1) RETURNING {_COLUMNS}, body",
                (self._clock(),),
            ).fetchall()
        return (TrialEntry(*row[0][:-1]), row[0][-1]) if row else None

    # -- ending -------------------------------------------------------------------------------------------------

    def finish(
        self,
        id: str,
        status: str,
        reason: str = "",
        result: bytes | None = None,
        artifacts: Mapping[str, bytes] | None = None,
    ) -> None:
        """Record how a trial ended, and delete its submission with all secrets."""
        with self._transaction as connection:
            connection.execute(
                "UPDATE trials SET status = ?, reason = ?, result = ?, ended_at = ?, body = x'' WHERE id = ?",
                (status, reason, result, self._clock(), id),
            )
            rows = [(id, name, data) for name, data in (artifacts or {}).items()]
            connection.executemany("INSERT OR REPLACE INTO artifacts VALUES (?, ?, ?)", rows)
        self._truncate_log()

    def cancel(self, id: str) -> None:
        """Record that a trial must end. A final status does not change.

        A running trial is `cancelling` until it has ended; an unknown one is cancelled before it is submitted.
        """
        now = self._clock()
        with self._transaction as connection:
            connection.execute("UPDATE trials SET status = 'cancelling' WHERE id = ? AND status = 'running'", (id,))
            connection.execute(
                "UPDATE trials SET status = 'cancelled', reason = ?, ended_at = ?, body = x'' "
                "WHERE id = ? AND status = 'queued'",
                ("it was cancelled before it started", now, id),
            )
            if is_id(id):
                columns = "digest, body, status, attempts, id, reason, submitted_at, ended_at"
                row = (id, "it was cancelled before it was submitted", now, now)
                connection.execute(
                    f"INSERT OR IGNORE INTO trials ({columns}) VALUES (x'', x'', 'cancelled', 0, ?, ?, ?, ?)", row
                )
        self._truncate_log()

    def requeue(self, id: str) -> bool:
        """Queue a running trial again, in its old place, as if it had not started; False if it was cancelled."""
        with self._transaction as connection:
            result = connection.execute(
                "UPDATE trials SET status = 'queued', attempts = attempts - 1, started_at = NULL "
                "WHERE id = ? AND status = 'running'",
                (id,),
            )
            return bool(result.rowcount)

    def recover(self) -> int:
        """After a kill: queue running trials again, or mark them lost after too many attempts; how many were queued."""
        with self._transaction as connection:
            connection.execute(
                "UPDATE trials SET status = 'cancelled', reason = 'it was cancelled', ended_at = ?, body = x'' "
                "WHERE status = 'cancelling'",
                (self._clock(),),
            )
            connection.execute(
                "UPDATE trials SET status = 'lost', reason = ?, ended_at = ?, body = x'' "
                "WHERE status = 'running' AND attempts >= ?",
                (f"the trial server was killed in each of its {ATTEMPTS} attempts", self._clock(), ATTEMPTS),
            )
            requeued = connection.execute("UPDATE trials SET status = 'queued' WHERE status = 'running'")
        self._truncate_log()
        return int(requeued.rowcount)

    def _truncate_log(self) -> None:
        """Empty the write-ahead log, which still contains data that was deleted from the file."""
        self._transaction.rows("PRAGMA wal_checkpoint(TRUNCATE)")

    def delete_older(self, age_s: float) -> None:
        """Delete trials that ended this long ago."""
        before = self._clock() - age_s
        with self._transaction as connection:
            connection.execute(
                "DELETE FROM artifacts WHERE trial IN (SELECT id FROM trials WHERE ended_at < ?)", (before,)
            )
            connection.execute("DELETE FROM trials WHERE ended_at < ?", (before,))

    # -- reading ------------------------------------------------------------------------------------------------

    def find(self, id: str) -> TrialEntry:
        """The entry of a trial; Refusal if the id is unknown."""
        rows = self._transaction.rows(f"SELECT {_COLUMNS} FROM trials WHERE id = ?", (id,))
        if not rows:
            raise Refusal(404, "not_found", f"unknown trial {id[:80]!r}; submit one with POST /trials", retry=False)
        return TrialEntry(*rows[0])

    def latest(self, limit: int) -> list[TrialEntry]:
        """The latest trials, newest first."""
        query = f"SELECT {_COLUMNS} FROM trials ORDER BY number DESC LIMIT ?"
        return [TrialEntry(*row) for row in self._transaction.rows(query, (limit,))]

    def counts(self) -> dict[str, int]:
        """The number of trials of each status."""
        return dict(self._transaction.rows("SELECT status, count(*) FROM trials GROUP BY status"))

    def body(self, id: str) -> bytes:
        """The submission of a trial; empty once its status is final."""
        return bytes(self._one("SELECT body FROM trials WHERE id = ?", (id,)) or b"")

    def result(self, id: str) -> bytes | None:
        """The result of a trial that ended."""
        return self._one("SELECT result FROM trials WHERE id = ?", (id,))

    def artifacts(self, id: str) -> Sequence[tuple[str, int]]:
        """Names and sizes of a trial's artifacts."""
        return self._transaction.rows("SELECT name, length(data) FROM artifacts WHERE trial = ? ORDER BY name", (id,))

    def artifact(self, id: str, name: str) -> bytes | None:
        """The contents of an artifact."""
        return self._one("SELECT data FROM artifacts WHERE trial = ? AND name = ?", (id, name))

    def _one(self, query: str, values: tuple[Any, ...]) -> bytes | None:
        rows = self._transaction.rows(query, values)
        return rows[0][0] if rows else None

    def close(self) -> None:
        """Close the file."""
        self._connection.close()
        os.close(self._lock)
