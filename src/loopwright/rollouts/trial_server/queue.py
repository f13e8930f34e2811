"""The queue: accepted trials and what became of them, in a SQLite file that outlives the server.

A trial is `queued`, `running`, perhaps `cancelling`, and then for good `ended` (with a result), `cancelled` or `lost`
(without one).
"""

import fcntl
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loopwright.core.errors import LedgerError, OutputBusy, storage
from loopwright.gateway.refusal import Refusal
from loopwright.ledger.sqlite import Transaction, connect, explained
from loopwright.rollouts.trial_server.submission import id_of, is_id

VERSION = 1
ATTEMPTS = 2
"""How often a trial is begun whose server was killed."""
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
OVER = ("ended", "cancelled", "lost")
STATUSES = ("queued", "running", "cancelling", *OVER)


@dataclass(frozen=True, slots=True)
class TrialEntry:
    """How a trial is."""

    id: str
    status: str
    attempts: int
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    reason: str

    @property
    def over(self) -> bool:
        """Whether nothing more becomes of it."""
        return self.status in OVER

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


class TrialQueue:
    """Trials in the order in which they came. Only its owner can read the file: it holds tokens of gateways."""

    def __init__(self, output: Path, *, most: int = 1000, clock: Callable[[], float] = time.time) -> None:
        self._most, self._clock = most, clock
        self.path = output / "trials.db"
        with storage(output, then="nothing was started"):
            output.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(output)
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        with explained(self.path):
            self._connection = connect(self.path, "NORMAL")
            self._connection.execute("PRAGMA secure_delete = ON")  # what is forgotten is overwritten
            (version,) = self._connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
            elif version != VERSION:
                raise LedgerError(
                    f"{self.path} has format {version}, and this Loopwright reads {VERSION}. Choose another --output."
                )
        self._transaction = Transaction(self.path, self._connection)

    # -- taking in ----------------------------------------------------------------------------------------------

    def add(self, key: str, digest: bytes, body: bytes) -> TrialEntry:
        """Queue a trial; with a key that is known, the one that there is. Refusal if that asks for something else."""
        id = id_of(key)
        with self._transaction as connection:
            known = connection.execute("SELECT digest FROM trials WHERE id = ?", (id,)).fetchone()
            if known is None:
                (waiting,) = connection.execute("SELECT count(*) FROM trials WHERE status = 'queued'").fetchone()
                if waiting >= self._most:
                    raise Refusal(429, "full", f"{waiting} trials wait already; ask again later")
                row = (id, digest, body, self._clock())
                columns = "id, digest, body, submitted_at, status, attempts, reason"
                connection.execute(f"INSERT INTO trials ({columns}) VALUES (?, ?, ?, ?, 'queued', 0, '')", row)
            elif known[0] not in (digest, b""):  # without a digest: it was cancelled before it came
                raise Refusal(409, "conflict", "this key belongs to a trial that asks for something else", retry=False)
        return self.find(id)

    def claim(self) -> tuple[TrialEntry, bytes] | None:
        """The trial that has waited longest, which is running from now on, and its submission."""
        with self._transaction as connection:
            row = connection.execute(
                "UPDATE trials SET status = 'running', attempts = attempts + 1, started_at = ? WHERE number = (SELECT "
                f"number FROM trials WHERE status = 'queued' ORDER BY number LIMIT 1) RETURNING {_COLUMNS}, body",
                (self._clock(),),
            ).fetchall()
        return (TrialEntry(*row[0][:-1]), row[0][-1]) if row else None

    # -- what became of them ------------------------------------------------------------------------------------

    def finish(
        self,
        id: str,
        status: str,
        reason: str = "",
        result: bytes | None = None,
        artifacts: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write down how a trial ended. What it was submitted with, secrets too, is forgotten."""
        with self._transaction as connection:
            connection.execute(
                "UPDATE trials SET status = ?, reason = ?, result = ?, ended_at = ?, body = x'' WHERE id = ?",
                (status, reason, result, self._clock(), id),
            )
            rows = [(id, name, data) for name, data in (artifacts or {}).items()]
            connection.executemany("INSERT OR REPLACE INTO artifacts VALUES (?, ?, ?)", rows)
        self._fold()

    def cancel(self, id: str) -> None:
        """Write down that a trial must not go on. What is over stays as it is.

        What runs is `cancelling` until it is finished; what is unknown is cancelled before it comes.
        """
        now = self._clock()
        with self._transaction as connection:
            connection.execute("UPDATE trials SET status = 'cancelling' WHERE id = ? AND status = 'running'", (id,))
            connection.execute(
                "UPDATE trials SET status = 'cancelled', reason = ?, ended_at = ?, body = x'' "
                "WHERE id = ? AND status = 'queued'",
                ("it was cancelled before it began", now, id),
            )
            if is_id(id):
                columns = "digest, body, status, attempts, id, reason, submitted_at, ended_at"
                row = (id, "it was cancelled before it came", now, now)
                connection.execute(
                    f"INSERT OR IGNORE INTO trials ({columns}) VALUES (x'', x'', 'cancelled', 0, ?, ?, ?, ?)", row
                )
        self._fold()

    def give_back(self, id: str) -> bool:
        """Queue a running trial again, in its old place, as if it had not begun; not one that was cancelled."""
        with self._transaction as connection:
            done = connection.execute(
                "UPDATE trials SET status = 'queued', attempts = attempts - 1, started_at = NULL "
                "WHERE id = ? AND status = 'running'",
                (id,),
            )
            return bool(done.rowcount)

    def recover(self) -> int:
        """After a kill: what ran is queued once more, or lost if that was so before; how many of them."""
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
            done = connection.execute("UPDATE trials SET status = 'queued' WHERE status = 'running'")
        self._fold()
        return int(done.rowcount)

    def _fold(self) -> None:
        """Empty the write-ahead log: it still has what was overwritten in the file."""
        self._transaction.rows("PRAGMA wal_checkpoint(TRUNCATE)")

    def forget(self, older_s: float) -> None:
        """Remove what ended so long ago."""
        before = self._clock() - older_s
        with self._transaction as connection:
            connection.execute(
                "DELETE FROM artifacts WHERE trial IN (SELECT id FROM trials WHERE ended_at < ?)", (before,)
            )
            connection.execute("DELETE FROM trials WHERE ended_at < ?", (before,))

    # -- looking ------------------------------------------------------------------------------------------------

    def find(self, id: str) -> TrialEntry:
        """How a trial is; Refusal if there is none of this id."""
        rows = self._transaction.rows(f"SELECT {_COLUMNS} FROM trials WHERE id = ?", (id,))
        if not rows:
            raise Refusal(404, "not_found", f"there is no trial {id[:80]!r}; submit one with POST /trials", retry=False)
        return TrialEntry(*rows[0])

    def latest(self, most: int) -> list[TrialEntry]:
        """The latest trials, newest first."""
        query = f"SELECT {_COLUMNS} FROM trials ORDER BY number DESC LIMIT ?"
        return [TrialEntry(*row) for row in self._transaction.rows(query, (most,))]

    def counts(self) -> dict[str, int]:
        """How many trials there are of each status."""
        return dict(self._transaction.rows("SELECT status, count(*) FROM trials GROUP BY status"))

    def body(self, id: str) -> bytes:
        """What a trial was submitted with; nothing once it is over."""
        return bytes(self._one("SELECT body FROM trials WHERE id = ?", (id,)) or b"")

    def result(self, id: str) -> bytes | None:
        """The result of a trial that ended."""
        return self._one("SELECT result FROM trials WHERE id = ?", (id,))

    def artifacts(self, id: str) -> Sequence[tuple[str, int]]:
        """Names and sizes of what was kept of a trial."""
        return self._transaction.rows("SELECT name, length(data) FROM artifacts WHERE trial = ? ORDER BY name", (id,))

    def artifact(self, id: str, name: str) -> bytes | None:
        """One of them."""
        return self._one("SELECT data FROM artifacts WHERE trial = ? AND name = ?", (id, name))

    def _one(self, query: str, values: tuple[Any, ...]) -> bytes | None:
        rows = self._transaction.rows(query, values)
        return rows[0][0] if rows else None

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()
        os.close(self._lock)


def _locked(output: Path) -> int:
    lock = os.open(output / "trials.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise OutputBusy(f"another trial server works in {output}. End it, or choose another --output.") from error
    return lock
