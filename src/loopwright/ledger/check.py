"""Check a ledger: SQLite's own structure, every event of the checksum chain against the rows, and the head file."""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import orjson

from loopwright.core.errors import LedgerError
from loopwright.ledger.events import KEEP_RESULTS, KINDS, RESERVED, RESULT, SET_STATE, EventKind, last_event
from loopwright.ledger.sqlite import (
    BOOT_ID,
    HEAD_RECORD,
    HEAD_SUFFIX,
    ORIGIN,
    Chain,
    connect,
    connect_to_read,
    damaged,
    explained,
    link,
)

_SUBJECTS = {
    "reserve": "what trial {key} was to do (its action, regime, key or group)",
    "result": "the result of trial {key}",
    **{kind: spec.subject for kind, spec in KINDS.items()},
}
_MAX_GAP = 10_000_000
"""Events that may be missing; a higher number of an event is itself the damage."""
_RESERVED = RESERVED.count(",") + 1
_NO_RESULT = (None, None, "", *(None,) * (RESULT.count(",") - 2))


@dataclass(frozen=True, slots=True)
class _Difference:
    """A part of the ledger that is not what its event recorded. `now` holds its values."""

    kind: str
    key: int
    name: str
    event: int | None
    """None if no event recorded it."""
    now: Sequence[Any]

    def __str__(self) -> str:
        problem = "was written by no event" if self.event is None else f"is not what event {self.event:,} recorded"
        return f"{_SUBJECTS[self.kind].format(key=self.key, name=self.name)} {problem}"


@dataclass
class Check:
    """What was checked, and what is wrong."""

    path: Path
    trials: int = 0
    events: int = 0
    damage: list[str] = field(default_factory=list)
    accepted: list[dict[str, Any]] = field(default_factory=list)
    """Earlier damage that the user accepted: when, and what it was."""

    @property
    def message(self) -> str:
        """The damage and the next move; empty without damage."""
        if not self.damage:
            return ""
        more = f" (and {len(self.damage) - 1:,} more)" if len(self.damage) > 1 else ""
        output = self.path.parent.parent
        return (
            f"{self.path} is damaged: {self.damage[0]}{more}. Nothing was changed. `loopwright check {output}` lists "
            "everything that is wrong. Restore the run's folder from a copy, or accept the ledger as it is with "
            f"`loopwright check {output} --accept`."
        )


def read_head(path: Path) -> tuple[int, bytes]:
    """The number and the hash of an event that the ledger must have, by the file beside it.

    Raises ValueError if the file makes no sense, OSError without one.
    """
    for _ in range(20):  # the writer may be in the middle of it
        content = path.with_suffix(HEAD_SUFFIX).read_bytes()
        events = []
        for start in range(0, len(content), HEAD_RECORD.size + 4):
            record, checksum = content[start:][: HEAD_RECORD.size], content[start:][HEAD_RECORD.size :][:4]
            if checksum == crc32(record).to_bytes(4):
                count, hash, boot = HEAD_RECORD.unpack(record)
                if boot.rstrip(b"\0") in (b"", BOOT_ID):
                    events.append((count, hash))
        if events:
            return max(events)
        time.sleep(0.005)
    raise ValueError("its own checksum does not match")


def check_ledger(path: Path) -> Check:
    """Check a ledger, also while another process writes it."""
    check = Check(path)
    # The head is read first: what is committed after that only puts the ledger further ahead.
    head = None
    try:
        head = read_head(path)
    except (OSError, ValueError) as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        name = path.with_suffix(HEAD_SUFFIX).name
        check.damage.append(f"{name} {reason}, so the last events may be missing as well")
    with explained(path), closing(connect_to_read(path)) as connection:
        connection.execute("BEGIN")  # one snapshot for everything below
        structure = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if structure != "ok":
            raise LedgerError(damaged(path, structure))
        hashes = _Hashes(path, connection)
        check.events = hashes.count
        check.trials = connection.execute("SELECT count(*) FROM trials").fetchone()[0]
        if head is not None:
            check.damage += _head_damage(hashes, path, *head)
        check.damage += _gap_damage(connection, hashes)
        check.damage += map(str, _differences(connection, hashes))
        for (value,) in connection.execute("SELECT value FROM state WHERE name = 'accepted'"):
            with suppress(ValueError):  # damaged as well, and reported so
                check.accepted += orjson.loads(value)
    return check


class _Hashes:
    """The hashes of all events by number, 16 bytes each; the first is that before the chain."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.count = last_event(connection)[0]
        counts = "SELECT 2 * (SELECT count(*) FROM trials) + (SELECT count(*) FROM recorded)"
        (rows,) = connection.execute(counts).fetchone()
        if self.count > rows + _MAX_GAP:
            raise LedgerError(damaged(path, f"event {self.count}, of at most {rows}"))
        hashes, known = bytearray(16 * (self.count + 1)), bytearray(self.count + 1)
        # Both events of a trial in one pass: the table is large. A hash of another length is damaged, and so none.
        for query in (
            "SELECT seq, hash, NULL, NULL FROM recorded",
            "SELECT reserve_seq, reserve_hash, result_seq, result_hash FROM trials",
        ):
            for one, one_hash, two, two_hash in connection.execute(query):
                if one is not None:
                    known[one] = 1
                    if one_hash is not None and len(one_hash) == 16:
                        hashes[16 * one : 16 * one + 16] = one_hash
                if two is not None:
                    known[two] = 1
                    if two_hash is not None and len(two_hash) == 16:
                        hashes[16 * two : 16 * two + 16] = two_hash
        self._bytes, self._known = bytes(hashes), known

    def __getitem__(self, seq: int) -> bytes:
        return self._bytes[16 * seq : 16 * seq + 16]

    def gaps(self) -> list[int]:
        """The numbers without an event."""
        return [seq for seq in range(1, self.count + 1) if not self._known[seq]] if 0 in self._known[1:] else []

    def differ(self, seq: int, kind: str, key: int, name: str, values: Sequence[Any]) -> bool:
        """Whether these values are not what an event recorded. What follows a gap cannot be told, and the gap is."""
        start = 16 * seq
        previous = self._bytes[start - 16 : start]
        if link((seq - 1, previous), kind, key, name, values)[1] == self._bytes[start : start + 16]:
            return False
        return previous != ORIGIN or seq == 1


def _head_damage(hashes: _Hashes, path: Path, count: int, hash: bytes) -> Iterator[str]:
    if count > hashes.count:
        yield (
            f"it ends with event {hashes.count:,}; the {count - hashes.count:,} events after that are missing. If "
            f"{path.name}-wal was deleted or left out of a copy, put it back"
        )
    elif hashes[count] != hash:
        yield f"its event {count:,} is not the one that {path.with_suffix(HEAD_SUFFIX).name} records"


def _gap_damage(connection: sqlite3.Connection, hashes: _Hashes) -> Iterator[str]:
    gaps = hashes.gaps()
    if not gaps:
        return
    numbers = {number for (number,) in connection.execute("SELECT number FROM trials")}
    missing = [number for number in range(1, max(numbers, default=0)) if number not in numbers]
    trials = f"; trial {', '.join(f'{number:,}' for number in missing[:5])} is missing" if missing else ""
    yield f"{len(gaps):,} events are missing, the first of them is event {gaps[0]:,}{trials}"


def _differences(connection: sqlite3.Connection, hashes: _Hashes) -> Iterator[_Difference]:
    trials = connection.execute(
        f"SELECT {RESERVED}, {RESULT}, reserve_seq, result_seq FROM trials WHERE reserve_seq IS NOT NULL"
    )
    for row in trials:
        number, reserve, result, reserved = row[0], row[:_RESERVED], row[_RESERVED:-2], row[-2]
        if hashes.differ(reserved, "reserve", number, "", reserve):
            yield _Difference("reserve", number, "", reserved, reserve)
        if row[-1] is None and result != _NO_RESULT:
            yield _Difference("result", number, "", None, result)
        elif row[-1] is not None and hashes.differ(row[-1], "result", number, "", result):
            yield _Difference("result", number, "", row[-1], result)
    for kind, spec in KINDS.items():
        # Some tables belong to one kind of run.
        if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", (spec.table,)).fetchone():
            yield from _differences_of(connection, hashes, kind, spec)


def _differences_of(
    connection: sqlite3.Connection, hashes: _Hashes, kind: str, spec: EventKind
) -> Iterator[_Difference]:
    wrong: dict[tuple[int, str], _Difference] = {}
    batches: dict[tuple[int, str], int] = {}
    for seq, key, name, values in _events(connection, kind, spec):
        if hashes.differ(seq, kind, key, name, values):
            wrong[key, name] = _Difference(kind, key, name, seq, values)
        elif wrong:
            wrong.pop((key, name), None)  # that event recorded what this one replaced
        if spec.many:
            batches[key, name] = len(values)
    yield from wrong.values()
    if spec.many:
        # What no batch covers is found by its number alone; the usual case is a single count.
        (count,) = connection.execute(f"SELECT count(*) FROM {spec.table} AS r WHERE {spec.rows}").fetchone()
        if count <= sum(batches.values()):
            return
    unrecorded = connection.execute(
        f"SELECT {spec.identity}, {spec.columns} FROM {spec.table} AS r LEFT JOIN "
        f"(SELECT DISTINCT key, name FROM recorded WHERE kind = ?) AS e ON {spec.where} "
        f"WHERE e.key IS NULL AND {spec.rows}",
        (kind,),
    )
    for key, name, *values in unrecorded:
        yield _Difference(kind, key, str(name), None, [values] if spec.many else values)


def _events(connection: sqlite3.Connection, kind: str, spec: EventKind) -> Iterator[tuple[int, int, str, list[Any]]]:
    """(number, key, name, values as they are now) of each event of a kind, in order."""
    if not spec.many:
        query = (
            f"SELECT e.seq, e.key, e.name, {spec.columns} FROM recorded AS e "
            f"LEFT JOIN {spec.table} AS r ON {spec.where} WHERE e.kind = ? ORDER BY e.seq"
        )
        for seq, key, name, *values in connection.execute(query, (kind,)):
            yield seq, key, name, values
        return
    where = spec.where.replace("e.key", ":key").replace("e.name", ":name")
    rows = f"SELECT {spec.columns} FROM {spec.table} AS r WHERE {where} ORDER BY 1"
    for seq, key, name in connection.execute("SELECT seq, key, name FROM events WHERE kind = ? ORDER BY seq", (kind,)):
        yield seq, key, name, connection.execute(rows, {"key": key, "name": name}).fetchall()


def accept_ledger(path: Path) -> Check:
    """Record a damaged ledger as it is now: new events replace those that disagree, and the head follows them."""
    check = check_ledger(path)
    with explained(path), closing(connect(path, "FULL")) as connection:
        connection.execute("BEGIN IMMEDIATE")
        chain, hashes = Chain(path, connection, last_event(connection)), _Hashes(path, connection)
        differences = list(_differences(connection, hashes))
        for seq in hashes.gaps():
            connection.execute("INSERT INTO events VALUES (?, 'gap', 0, '', ?)", (seq, ORIGIN))
        for difference in differences:
            kind, key, name, now = difference.kind, difference.key, difference.name, difference.now
            if kind in KINDS:
                chain.add(kind, key, now, name)
                continue
            if kind == "result":
                connection.execute(f"{KEEP_RESULTS} AND number = ?", (key,))
            else:
                old = (difference.event, "replaced", key, "", hashes[difference.event or 0])
                connection.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", old)
            chain.last = link(chain.last, kind, key, "", now)
            connection.execute(
                f"UPDATE trials SET {kind}_seq = ?, {kind}_hash = ? WHERE number = ?", (*chain.last, key)
            )
        accepted = [*check.accepted, {"at": time.time(), "damage": check.damage}]
        row = ("accepted", orjson.dumps(accepted).decode())
        connection.execute(SET_STATE, row)
        chain.add("state", 0, row[1:], row[0])
        connection.execute("COMMIT")
        chain.close()
    return check_ledger(path)
