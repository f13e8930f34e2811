"""The ledger: a run's append-only history, which is also its cache and its resume point.

One SQLite file in WAL mode per run. A trial is reserved before it starts, attempted, and committed when it ends, so
that neither parallel trials nor crashes can lose or repeat a number. One process writes; any number may read.
Every write is an event of a checksum chain (`events.py`), so that damage is noticed.
"""

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any, Literal, Self

import orjson

from loopwright.core.errors import LedgerError, storage
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.trial import Result, Reward, Trial
from loopwright.ledger.check import check_ledger
from loopwright.ledger.events import EVENTS_SCHEMA, KEEP_RESULTS, KINDS, RESERVED, SET_STATE, last_event, returning
from loopwright.ledger.sqlite import Chain, Transaction, connect, connect_to_read, explained, link, text

VERSION = 6
_SCHEMA = """
CREATE TABLE trials (
    number INTEGER PRIMARY KEY, grp INTEGER NOT NULL, repeat INTEGER NOT NULL, action TEXT NOT NULL, key TEXT NOT NULL,
    draw INTEGER, regime TEXT NOT NULL, noise TEXT, phase TEXT,
    outcome TEXT, fault TEXT, reason TEXT NOT NULL DEFAULT '',
    reward REAL, reward_detail TEXT, metrics TEXT, usage TEXT, cached_from TEXT,
    reserved_at REAL NOT NULL, finished_at REAL,
    reserve_seq INTEGER, reserve_hash BLOB, result_seq INTEGER, result_hash BLOB
) STRICT;
CREATE TABLE attempts (
    trial INTEGER NOT NULL, attempt INTEGER NOT NULL, handle TEXT NOT NULL,
    started_at REAL NOT NULL, ended_at REAL, outcome TEXT, reason TEXT,
    seq INTEGER, hash BLOB, PRIMARY KEY (trial, attempt)
) STRICT, WITHOUT ROWID;
CREATE TABLE payloads (
    trial INTEGER NOT NULL, kind TEXT NOT NULL, data BLOB NOT NULL, PRIMARY KEY (trial, kind)
) STRICT;
CREATE TABLE state (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
"""
_INDEX_KEYS = (
    "CREATE INDEX IF NOT EXISTS trials_by_key ON trials (key) "
    "WHERE outcome IN ('ok', 'infeasible') AND cached_from IS NULL AND key <> ''"
)
_COLUMNS = (
    "number, grp, repeat, action, key, draw, regime, outcome, fault, reason, reward, reward_detail, metrics, usage, "
    "cached_from, reserved_at, finished_at, noise, phase"
)
_PLACES = ", ".join("?" * (RESERVED.count(",") + 3))
_INSERT_TRIAL = f"INSERT INTO trials ({RESERVED}, reserve_seq, reserve_hash) VALUES ({_PLACES})"
_SET_RESULT = (
    "UPDATE trials SET outcome = ?, fault = ?, reason = ?, reward = ?, reward_detail = ?, metrics = ?, usage = ?, "
    "cached_from = ?, finished_at = ?, result_seq = ?, result_hash = ? WHERE number = ? AND outcome IS "
)
_SET_FIRST_RESULT, _SET_LATER_RESULT = f"{_SET_RESULT} NULL", f"{_SET_RESULT} ?"
_SET_ATTEMPT = (
    "INSERT INTO attempts (trial, attempt, handle, started_at) "
    "SELECT ?, count(*) + (count(*) = count(ended_at)), ?, ? FROM attempts WHERE trial = ? "
    "ON CONFLICT DO UPDATE SET handle = excluded.handle RETURNING attempt, started_at"
)
_INSERT_FIRST_ATTEMPT = (
    "INSERT OR IGNORE INTO attempts (trial, attempt, handle, started_at, seq, hash) VALUES (?, 1, ?, ?, ?, ?)"
)
_ATTEMPT = returning("trial, attempt", KINDS["attempt"].columns)


class Ledger(AbstractContextManager["Ledger"]):
    """A run's record. Safe to use from several threads of the writing process.

    >>> with Ledger.create(Path("out/matmul/ledger.db")) as ledger:
    ...     ledger.reserve([trial])
    ...     ledger.attempt(trial.number, handle)
    ...     trial = ledger.commit(trial, result)
    """

    chain: Chain
    """Records every write, in its transaction. A ledger that was opened for reading has none."""

    def __init__(self, path: Path, connection: sqlite3.Connection, chain: Chain | None = None) -> None:
        self.path = path
        self._connection = connection
        if chain is not None:
            self.chain = chain
        self.transaction = Transaction(path, connection, chain=chain)
        """Every write goes through it, and is added to the chain; what is held in it is written together."""
        self._rows = self.transaction.rows
        self.flush = self.transaction.flush
        """Write to disk everything that was reserved and committed."""
        self._has_keys_indexed = chain is None

    # -- opening ------------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        synchronous: Literal["NORMAL", "FULL"] = "NORMAL",
        state: Mapping[str, Any] | None = None,
        private: bool = False,
    ) -> Self:
        """A new ledger without trials, with the state of the run. A ledger that exists is an error.

        Only its owner can read a `private` one, whatever the umask; its write-ahead log inherits that.
        """
        if path.exists():
            raise LedgerError(f"{path} exists already. Continue with `loopwright resume`, or choose another --output.")
        # Written to another name and moved into place: after a crash there is a whole ledger, or none.
        part = path.with_name(f".{path.name}.part")
        with explained(path), storage(path):
            for leftover in part.parent.glob(f"{part.name}*"):
                leftover.unlink()
            if private:
                part.touch(0o600)
                part.chmod(0o600)
            # Synced once, when it is complete: on a busy disk each sync takes milliseconds.
            with closing(connect(part, "OFF")) as connection:
                connection.executescript(
                    f"BEGIN IMMEDIATE; {_SCHEMA} {EVENTS_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;"
                )
                chain = Chain(path, connection)
                first = cls(path, connection, chain)
                for name, value in (state or {}).items():
                    first.set_state(name, value)
            chain.publish(sync=True)  # before the ledger is there: without its head it would seem damaged
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.rename(path)
            chain.connection = connect(path, synchronous)
            return cls(path, chain.connection, chain)

    @classmethod
    def open(cls, path: Path, *, synchronous: Literal["NORMAL", "FULL"] = "NORMAL") -> Self:
        """An existing ledger, checked for damage, for continuing it."""
        # Read first: opening for writing would make even an empty file look like a database.
        cls.read(path).close()
        if problem := check_ledger(path).message:
            raise LedgerError(problem)
        with explained(path):
            connection = connect(path, synchronous)
            chain = Chain(path, connection, last_event(connection))
            chain.publish(sync=True)
            return cls(path, connection, chain)

    @classmethod
    def read(cls, path: Path) -> Self:
        """An existing ledger, for reading only, also while another process writes it."""
        if not path.is_file():
            raise LedgerError(f"no ledger at {path}. Give the output directory of a run.")
        with explained(path):
            connection = connect_to_read(path)
            version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version != VERSION:
            connection.close()
            problem = f"has version {version}; this Loopwright reads {VERSION}" if version else "is not a ledger"
            raise LedgerError(f"{path} {problem}. Use the Loopwright that wrote it, or choose another --output.")
        return cls(path, connection)

    def close(self) -> None:
        """Fold the write-ahead log into the file and close it."""
        with explained(self.path):
            self.transaction.flush()
            if hasattr(self, "chain"):
                self.chain.close()
            self._connection.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- writing: reserve, attempt, commit ----------------------------------------------------------------------

    def reserve(self, trials: Sequence[Trial], note: Mapping[str, Any] | None = None, *, hold: bool = False) -> None:
        """Write new trials before anything else happens to them, with their agent's note.

        With `hold` it is on disk only after the next `flush` or `attempt`; one comes before anything is started.
        """
        transaction = self.transaction.held if hold else self.transaction
        with transaction.single if len(trials) == 1 and note is None else transaction as connection:
            for t in trials:
                drawn = (text(t.regime) if t.regime else "{}", text(t.noise) if t.noise else "{}")
                draw = (t.draw, *drawn, t.phase, float(t.reserved_at))
                row = (t.number, t.group, t.repeat, text(t.action), t.key, *draw)
                self.chain.last = link(self.chain.last, "reserve", t.number, "", row)
                connection.execute(_INSERT_TRIAL, (*row, *self.chain.last))
            if note is not None:
                self.chain.put_payload(trials[0].number, "note", orjson.dumps(note))

    def attempt(self, number: int, handle: str) -> int:
        """Record the process or job that works on a trial now, so that a resumed run can end or adopt it.

        It belongs to the open attempt at the trial, whose number is returned; if there is none, it opens one.
        """
        row = (handle, time.time(), None, None, None)
        with self.transaction.single as connection:
            event = link(self.chain.last, "attempt", number, "1", row)
            if connection.execute(_INSERT_FIRST_ATTEMPT, (number, *row[:2], *event)).rowcount == 1:
                self.chain.last = event
                return 1
        with self.transaction as connection:
            ((attempt, started_at),) = connection.execute(_SET_ATTEMPT, (number, *row[:2], number)).fetchall()
            self.chain.add("attempt", number, (handle, started_at, *row[2:]), str(attempt))
        return int(attempt)

    def commit(self, trial: Trial, result: Result, *, hold: bool = False, replaces: Outcome = Outcome.ABORTED) -> Trial:
        """Write how a trial ended and return it; its attempt, if there was one, ends with it.

        With `hold` it is on disk only after the next `flush`, or with the next write. A trial that has ended is an
        error unless its outcome is the one that this result `replaces`.
        """
        reward = result.reward
        finished = Trial(
            trial.number,
            trial.action,
            trial.key,
            trial.group,
            trial.repeat,
            trial.draw,
            trial.regime,
            result.outcome,
            result.fault,
            result.reason,
            reward,
            result.metrics,
            result.usage,
            result.cached_from,
            trial.reserved_at,
            time.time() if replaces is Outcome.ABORTED else trial.finished_at,
            trial.noise,
            trial.phase,
        )
        values = (
            finished.outcome,
            finished.fault,
            finished.reason,
            None if reward is None else float(reward.value),
            None if reward is None else text({"parts": reward.parts, "more": reward.more}),
            text(finished.metrics),
            text(finished.usage),
            finished.cached_from,
            finished.finished_at,
        )
        with self.transaction.held if hold else self.transaction as connection:
            self.chain.last = link(self.chain.last, "result", finished.number, "", values)
            row = (*values, *self.chain.last, finished.number)
            if connection.execute(_SET_FIRST_RESULT, row).rowcount != 1:
                connection.execute(f"{KEEP_RESULTS} AND number = ? AND outcome = ?", (finished.number, replaces))
                if connection.execute(_SET_LATER_RESULT, (*row, replaces)).rowcount != 1:
                    raise LedgerError(f"{self.path}: trial {trial.number} was never reserved, or is finished already.")
            if result.episode is not None:
                self.chain.put_payload(finished.number, "rollout", result.episode)
            if result.curve is not None:
                self.chain.put_payload(finished.number, "curve", orjson.dumps(result.curve))
            if finished.outcome is Outcome.ABORTED:
                # The end of a trial's last attempt is the end of the trial; only an earlier one needs its own.
                self.chain.update(
                    "attempt",
                    "UPDATE attempts SET ended_at = ?, outcome = ?, reason = ? WHERE trial = ? AND ended_at IS NULL "
                    + _ATTEMPT,
                    (finished.finished_at, finished.outcome, finished.reason, finished.number),
                )
        return finished

    def append(
        self,
        trials: Sequence[tuple[Any, ...]],
        episodes: Sequence[tuple[int, bytes]] = (),
        unfinished: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]] = (),
    ) -> None:
        """Write many live trials at once, as (number, group, action, draw, regime, outcome, fault, reason, reward,
        reward_detail, metrics, reserved_at, finished_at), and the episodes that ended, as (last trial, JSON). Numbers
        only rise, over all calls. Row and facts of each `unfinished` episode are stored for `close_episodes`.
        """
        with self.transaction as connection:
            connection.executemany(
                "INSERT INTO trials (number, grp, repeat, action, key, draw, regime, outcome, fault, reason, reward, "
                "reward_detail, metrics, reserved_at, finished_at) "
                "VALUES (?, ?, 0, ?, '', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                trials,
            )
            connection.executemany("INSERT INTO payloads VALUES (?, 'episode', ?)", episodes)
            self.chain.add_batches("live", trials)
            self.chain.add_batches("episodes", episodes)
            if unfinished:
                row = ("unfinished", text(unfinished))
                connection.execute(SET_STATE, row)
                self.chain.add("state", 0, row[1:], row[0])

    def put_payload(self, number: int, kind: str, data: bytes) -> None:
        """Store a larger value with a trial."""
        with self.transaction:
            self.chain.put_payload(number, kind, data)

    def set_state(self, name: str, value: Any) -> None:
        """Store a value with the run."""
        row = (name, text(value))
        with self.transaction as connection:
            connection.execute(SET_STATE, row)
            self.chain.add("state", 0, row[1:], name)

    def close_attempts(self, numbers: Iterable[int], reason: str = "the process that ran it died") -> None:
        """End the open attempts at these trials, which stay unfinished."""
        with self.transaction:
            for number in numbers:
                self.chain.update(
                    "attempt",
                    "UPDATE attempts SET ended_at = ?, outcome = 'lost', reason = ? "
                    f"WHERE trial = ? AND ended_at IS NULL {_ATTEMPT}",
                    (time.time(), reason, number),
                )

    def close_episodes(self) -> None:
        """End the episodes that a dead process left open: their rows hold the steps that were written."""
        if not (episodes := self.state("unfinished")):
            return
        last = self.last()[0]
        left = sorted((row, facts) for row, facts in episodes if row[0] > last)
        self.append([tuple(row) for row, _ in left], [(row[0], orjson.dumps(facts)) for row, facts in left])

    # -- reading ------------------------------------------------------------------------------------------------

    def find(self, key: str) -> Trial | None:
        """The first trial that answers this key, in time that does not depend on how many there are."""
        if not self._has_keys_indexed:
            # Only now: most runs propose no point twice, and the index costs more than any other page of a commit.
            with self.transaction as connection:
                connection.execute(_INDEX_KEYS)
            self._has_keys_indexed = True
        rows = self._rows(
            f"SELECT {_COLUMNS} FROM trials WHERE key = ? AND outcome IN ('ok', 'infeasible') "
            "AND cached_from IS NULL AND key <> '' ORDER BY number LIMIT 1",
            (key,),
        )
        return _trial(rows[0]) if rows else None

    def answered_keys(self) -> set[int]:
        """The hashes of the keys that `find` has a trial for, which take less memory than the keys."""
        query = (
            "SELECT number, key FROM trials WHERE outcome IN ('ok', 'infeasible') AND cached_from IS NULL "
            "AND key <> '' AND number > ? ORDER BY number LIMIT 10000"
        )
        hashes, last = set[int](), 0
        while rows := self._rows(query, (last,)):
            hashes.update(hash(key) for _, key in rows)
            last = rows[-1][0]
        return hashes

    def keys(self) -> set[str]:
        """The keys of all trials that an agent proposed."""
        return {key for (key,) in self._rows("SELECT DISTINCT key FROM trials WHERE key <> '' AND phase = ''")}

    def trial(self, number: int) -> Trial | None:
        """One trial by its number."""
        rows = self._rows(f"SELECT {_COLUMNS} FROM trials WHERE number = ?", (number,))
        return _trial(rows[0]) if rows else None

    def trials(self, *, after: int = 0, where: str = "1") -> Iterator[Trial]:
        """All trials by number, or those that meet a condition in SQL; in pages, so that the writer never waits."""
        query = f"SELECT {_COLUMNS} FROM trials WHERE number > ? AND ({where}) ORDER BY number LIMIT 5000"
        while rows := self._rows(query, (after,)):
            yield from map(_trial, rows)
            after = rows[-1][0]

    def unfinished(self) -> list[Trial]:
        """The trials that a resumed run attempts again: in flight when the process died, or aborted."""
        where = "WHERE outcome IS NULL OR outcome = 'aborted'"
        return [_trial(row) for row in self._rows(f"SELECT {_COLUMNS} FROM trials {where} ORDER BY number")]

    def group(self, number: int) -> list[Trial]:
        """The trials of one group."""
        return [
            _trial(row) for row in self._rows(f"SELECT {_COLUMNS} FROM trials WHERE grp = ? ORDER BY number", (number,))
        ]

    def open_attempts(self) -> dict[int, tuple[int, str]]:
        """(attempt, handle) by trial: what a dead writer may have left running."""
        rows = self._rows(
            "SELECT trial, attempt, handle FROM attempts JOIN trials ON number = trial "
            "WHERE ended_at IS NULL AND ifnull(trials.outcome, 'aborted') = 'aborted'"
        )
        return {trial: (attempt, handle) for trial, attempt, handle in rows}

    def last(self) -> tuple[int, int, int]:
        """The highest trial number, group and draw so far."""
        (row,) = self._rows("SELECT ifnull(max(number), 0), ifnull(max(grp), 0), ifnull(max(draw), 0) FROM trials")
        return row  # type: ignore[no-any-return]

    def counts(self) -> dict[str, int]:
        """How many trials ended in each way; trials in flight count as `running`, cached ones as `cached` as well."""
        rows = self._rows("SELECT ifnull(outcome, 'running'), count(*), count(cached_from) FROM trials GROUP BY 1")
        return {name: count for name, count, _ in rows} | {"cached": sum(row[2] for row in rows)}

    def rewards(self) -> tuple[int, float, Trial | None]:
        """How many trials have a reward, the sum of these, and the first trial with the best that an agent proposed."""
        finished = "outcome <> 'aborted' AND reward IS NOT NULL"
        ((count, total),) = self._rows(f"SELECT count(*), total(reward) FROM trials WHERE {finished}")
        proposed = f"{finished} AND ifnull(phase, '') = ''"
        best = self._rows(f"SELECT {_COLUMNS} FROM trials WHERE {proposed} ORDER BY reward DESC, number LIMIT 1")
        return count, total, _trial(best[0]) if best else None

    def worst(self) -> float | None:
        """The lowest reward so far."""
        ((lowest,),) = self._rows("SELECT min(reward) FROM trials")
        return None if lowest is None else float(lowest)

    def attempts(self, number: int) -> list[tuple[int, float, float | None, str | None]]:
        """(attempt, started at, ended at, outcome) of a trial."""
        return self._rows(
            "SELECT attempt, started_at, ifnull(ended_at, finished_at), ifnull(a.outcome, t.outcome) "
            "FROM attempts AS a JOIN trials AS t ON t.number = a.trial WHERE trial = ? ORDER BY attempt",
            (number,),
        )

    def payload(self, number: int, kind: str) -> bytes | None:
        """A value that was stored with a trial."""
        rows = self._rows("SELECT data FROM payloads WHERE trial = ? AND kind = ?", (number, kind))
        return rows[0][0] if rows else None

    def payloads(self, kind: str) -> list[tuple[int, bytes]]:
        """All values of this kind, each with its trial's number."""
        return self._rows("SELECT trial, data FROM payloads WHERE kind = ? ORDER BY trial", (kind,))

    def notes(self) -> dict[int, Mapping[str, Any]]:
        """The agent's notes, by trial number."""
        return {number: orjson.loads(data) for number, data in self.payloads("note")}

    def episodes(self) -> Iterator[dict[str, Any]]:
        """The live episodes that ended, in order: first and last trial, return, length, regime."""
        after = 0
        query = "SELECT trial, data FROM payloads WHERE kind = 'episode' AND trial > ? ORDER BY trial LIMIT 5000"
        while rows := self._rows(query, (after,)):
            yield from (orjson.loads(data) for _, data in rows)
            after = rows[-1][0]

    def state(self, name: str, default: Any = None) -> Any:
        """A value that was stored with the run."""
        rows = self._rows("SELECT value FROM state WHERE name = ?", (name,))
        return orjson.loads(rows[0][0]) if rows else default


def _trial(row: Sequence[Any]) -> Trial:
    detail = None if row[11] is None else orjson.loads(row[11])
    return Trial(
        number=row[0],
        group=row[1],
        repeat=row[2],
        action=orjson.loads(row[3]),
        key=row[4],
        draw=row[5],
        regime=orjson.loads(row[6]),
        outcome=None if row[7] is None else Outcome(row[7]),
        fault=None if row[8] is None else Fault(row[8]),
        reason=row[9],
        reward=None if detail is None else Reward(row[10], detail["parts"], tuple(detail["more"])),
        metrics=orjson.loads(row[12]) if row[12] else {},
        usage=orjson.loads(row[13]) if row[13] else {},
        cached_from=row[14],
        reserved_at=row[15],
        finished_at=row[16],
        noise={} if row[17] in (None, "{}") else orjson.loads(row[17]),
        phase=row[18] or "",
    )
