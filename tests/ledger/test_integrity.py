"""The checksum chain: whatever is changed, deleted or set back in a ledger is noticed, and a crash is not damage."""

import os
import re
import shutil
import signal
import sqlite3
import sys
from contextlib import closing
from dataclasses import replace
from zlib import crc32

import pytest

from loopwright.core.errors import LedgerError
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Result, Reward, Trial
from loopwright.ledger.check import accept_ledger, check_ledger, read_head
from loopwright.ledger.groups import Groups
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import Rejudgement, add_rejudgements, rejudgements
from loopwright.ledger.sqlite import BOOT_ID, HEAD_RECORD
from loopwright.ledger.steps import Step, Steps

OK = Result(Outcome.OK, {"y": 2.0}, usage={"wall_s": 1.0}, reward=Reward(2, {"y": 2.0}))


def trial(number, **more):
    return replace(Trial(number=number, action={"x": number}, key=f"key-{number}", group=number), **more)


def head_path(path):
    return path.with_suffix(".head")


def write_everything(ledger):
    """One of each thing that a ledger can hold, some of them replaced."""
    ledger.reserve([trial(1), trial(2, draw=4, regime={"size": 8})], {"sampler": "state"})
    assert ledger.attempt(1, "12345:678") == 1
    assert ledger.attempt(1, "12346:679") == 1
    ledger.commit(trial(1), Result(Outcome.ABORTED, reason="stopped"))
    ledger.attempt(1, "12347:680")
    ledger.commit(trial(1), OK)
    ledger.close_attempts([1])
    ledger.set_state("finished", False)
    ledger.set_state("finished", True)
    ledger.put_payload(2, "data", b"some bytes")
    ledger.append(
        [(n, 9, "[1]", None, "{}", "ok", None, "", 1.5, '{"parts":{},"more":[]}', "{}", 3.0, 4.0) for n in (3, 4, 5)],
        [(5, b'{"return":4.5}')],
        ((6,), {}),
    )
    groups, steps = Groups(ledger), Steps(ledger)
    for number, move in ((6, "filtered"), (7, "failed")):
        groups.open(number, "sums", [trial(number)])
        ledger.commit(trial(number), replace(OK, episode=b"an episode"))
        groups.close(number, move)
    groups.open(8, "sums", [trial(8)])
    ledger.commit(trial(8), OK)
    groups.ready(8, 0)
    assert groups.expire(1) == [8]
    for number in (1, 2):
        steps.add("train", Step(number, float(number), {"loss": 0.5}))
    steps.forget(1)
    ledger.reserve([trial(9)])
    ledger.attempt(9, "12348:681")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "out" / "run" / "ledger.db"
    path.parent.mkdir(parents=True)
    with Ledger.create(path, state={"id": "abc"}) as ledger:
        write_everything(ledger)
    return path


def execute(path, *statements):
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            assert connection.execute(statement).rowcount != 0
        connection.commit()


def test_an_untouched_ledger_is_in_order(path):
    check = check_ledger(path)
    assert (check.damage, check.trials) == ([], 9)
    Ledger.open(path).close()


def values(path):
    """Every value of the ledger, as (table, column, rowid or primary key condition)."""
    keys = {"attempts": ("trial", "attempt"), "steps": ("kind", "step")}
    with closing(sqlite3.connect(path)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        for table in tables:
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            for row in connection.execute(f"SELECT {', '.join(map('quote({})'.format, columns))} FROM {table}"):
                named = dict(zip(columns, row, strict=True))
                key = keys.get(table, columns[:1]) if table != "payloads" else ("trial", "kind")
                for column in columns:
                    yield table, column, " AND ".join(f"{name} = {named[name]}" for name in key), named[column]


def another(value):
    """A value of the same type that differs in one digit or letter; None for NULL, which takes any."""
    if value == "NULL":
        return None
    if value.startswith("X'"):
        return value[:-2] + ("1" if value[-2] == "0" else "0") + "'"
    if value.startswith("'"):
        return f"'{value[1:-1]}1'"
    return str(float(value) + 0.5) if "." in value else str(int(value) + 100)


def test_every_changed_value_is_noticed(path, tmp_path):
    """All of them, one after another: no column of any table is outside the chain."""
    copy = tmp_path / "copy" / "ledger.db"
    copy.parent.mkdir()
    missed, changed = [], 0
    for table, column, where, value in values(path):
        if (new := another(value)) is None:
            continue
        shutil.copy(path, copy)
        shutil.copy(head_path(path), head_path(copy))
        execute(copy, f"UPDATE {table} SET {column} = {new} WHERE {where}")
        changed += 1
        try:
            noticed = bool(check_ledger(copy).damage)
        except LedgerError:
            noticed = True
        if not noticed:
            missed.append((table, column, where))
    assert changed > 200
    # The label of an event that was replaced later says nothing about the ledger.
    replaced = ("attempts", "hash", "trial = 1 AND attempt = 1")
    assert [each for each in missed if each[0] != "events" and each != replaced] == []


@pytest.mark.parametrize("value", ["NULL", "X''", "-1", "10000000000000", "9223372036854775807"])
@pytest.mark.parametrize(
    ("table", "column"),
    [
        *(("trials", name) for name in ("reserve_seq", "reserve_hash", "result_seq", "result_hash")),
        *(("events", name) for name in ("seq", "hash")),
    ],
)
def test_damage_to_the_chain_itself_is_damage(path, table, column, value):
    """A number that no event can have must not be taken as the number of events."""
    try:
        execute(path, f"UPDATE {table} SET {column} = {value} WHERE rowid = (SELECT min(rowid) FROM {table})")
    except sqlite3.Error:
        return  # SQLite refuses a value of this type
    try:
        assert check_ledger(path).damage
    except LedgerError as error:
        assert "damaged" in str(error)  # noqa: PT017  either is right
    with pytest.raises(LedgerError, match="damaged"):
        Ledger.open(path)


def test_a_trial_is_named(path):
    execute(path, "UPDATE trials SET reward = 2.5 WHERE number = 1")
    (line,) = check_ledger(path).damage
    assert re.fullmatch(r"the result of trial 1 is not what event \d+ recorded", line)
    with pytest.raises(LedgerError, match=r"the result of trial 1 .*Nothing was changed.*loopwright check .*--accept"):
        Ledger.open(path)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("DELETE FROM trials WHERE number = 2", "events are missing, .*trial 2 is missing"),
        ("DELETE FROM trials WHERE number = 4", "one of the trials 3 to 5 is not"),
        ("DELETE FROM payloads WHERE kind = 'note'", "the payload 'note' of trial 1 is not"),
        ("DELETE FROM events WHERE kind = 'group' AND key = 7", "missing"),
        (
            "INSERT INTO payloads VALUES (1, 'rollout', x'00')",
            "the payload 'rollout' of trial 1 was written by no event",
        ),
        (
            "UPDATE trials SET outcome = 'ok', reward = 9 WHERE number = 9",
            "the result of trial 9 was written by no event",
        ),
        (
            "INSERT INTO trials (number, grp, repeat, action, key, regime, reserved_at) "
            "VALUES (77, 1, 0, '', '', '', 1)",
            "trials 77 to 77 was written by no event",
        ),
    ],
)
def test_deleted_and_inserted_rows_are_noticed_and_can_be_accepted(path, statement, message):
    execute(path, statement)
    assert any(re.search(message, line) for line in check_ledger(path).damage)

    accepted = accept_ledger(path)

    assert accepted.damage == []
    assert re.search(message, " ".join(accepted.accepted[0]["damage"]))
    with Ledger.open(path) as ledger:
        ledger.reserve([trial(100)])
    assert check_ledger(path).damage == []


def test_a_missing_or_foreign_head_is_noticed(path, tmp_path):
    head = head_path(path)
    stored = head.read_bytes()
    head.unlink()
    assert "ledger.head is missing" in check_ledger(path).damage[0]
    with Ledger.create(tmp_path / "other.db", state={"id": "other"}):
        pass
    head.write_bytes(head_path(tmp_path / "other.db").read_bytes())
    assert "is not the one that ledger.head records" in check_ledger(path).damage[0]
    head.write_bytes(bytes(byte ^ 1 for byte in stored))
    assert "ledger.head cannot be read (its own checksum does not match)" in check_ledger(path).damage[0]


# -- crashes --------------------------------------------------------------------------------------------------------


def killed_before(path, name, count):
    """Write to a new ledger in a child that is killed just before its n-th call of this function; False if it ended."""
    path.parent.mkdir(parents=True)
    pid = os.fork()
    if pid == 0:
        left = count

        def watch(_, event, function):
            nonlocal left
            if event == "c_call" and function.__name__ == name:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        try:
            ledger = Ledger.create(path, state={"id": "abc"})
            sys.setprofile(watch)
            write_everything(ledger)
            ledger.close()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.parametrize(("name", "least"), [("crc32", 15), ("fsync", 1), ("flush", 1), ("execute", 50)])
def test_s13_death_at_any_moment_is_not_damage(tmp_path, name, least):
    """Within a transaction, between a commit and its head, before the log or the head is synced."""
    for died in range(1000):
        path = tmp_path / str(died) / "run" / "ledger.db"
        if not killed_before(path, name, died + 1):
            break
        assert check_ledger(path).damage == []
        Ledger.open(path).close()
        assert check_ledger(path).damage == []
    assert died >= least


def test_a_deleted_write_ahead_log_is_noticed(tmp_path):
    path = tmp_path / "killed" / "run" / "ledger.db"
    assert killed_before(path, "execute", 40)
    log = path.with_name("ledger.db-wal")
    assert log.stat().st_size > 0
    log.unlink()
    assert "If ledger.db-wal was deleted or left out of a copy, put it back" in check_ledger(path).damage[0]
    with pytest.raises(LedgerError, match=r"is damaged: it ends with event 1; the \d+ events after that are missing"):
        Ledger.open(path)


def write_head(path, *records):
    """Write records to the head as a crash, a restart or a power failure would leave them."""
    contents = [HEAD_RECORD.pack(count, hash, boot) for count, hash, boot in records]
    head_path(path).write_bytes(b"".join(content + crc32(content).to_bytes(4) for content in contents))


def test_after_a_power_failure_only_what_was_synced_must_be_there(path):
    """The machine restarted: the head's last words may have reached the disk without the commits before them."""
    synced, later = read_head(path), (check_ledger(path).events + 3, b"f" * 16)
    write_head(path, (*later, BOOT_ID), (*synced, b""))
    assert "the 3 events after that are missing" in check_ledger(path).damage[0]
    write_head(path, (*later, b"00000000-0000-0000-0000-000000000000"), (*synced, b""))
    assert check_ledger(path).damage == []
    write_head(path, (*synced, b""), (*later, b""))
    assert "the 3 events after that are missing" in check_ledger(path).damage[0]


def test_a_record_of_the_head_that_was_cut_in_half_is_not_damage(path):
    """A process may die while it writes one of them: the ones before it count."""
    content = bytearray(head_path(path).read_bytes())
    size = len(content) // 4
    for torn in range(4):
        half = content.copy()
        half[torn * size : torn * size + size // 2] = b"\xff" * (size // 2)
        head_path(path).write_bytes(half)
        assert check_ledger(path).damage == []


def test_an_undone_write_leaves_the_chain_whole(tmp_path):
    path = tmp_path / "ledger.db"
    with Ledger.create(path) as ledger:
        ledger.reserve([trial(1)], hold=True)
        for hold in (True, False):
            with pytest.raises(LedgerError):
                ledger.reserve([trial(2), trial(1)], {"note": 1}, hold=hold)
            with pytest.raises(LedgerError):
                ledger.reserve([trial(1)], hold=hold)
        ledger.commit(trial(1), OK)
        with pytest.raises(LedgerError, match="finished already"):
            ledger.commit(trial(1), OK)
    assert check_ledger(path).damage == []


def test_a_later_verdict_is_added_and_replaces_nothing(path):
    with Ledger.open(path) as ledger:
        before = ledger.transaction.rows("SELECT * FROM payloads")
        add_rejudgements(ledger, [(6, Rejudgement("strict-1", Reward(0.5)))])
        add_rejudgements(ledger, [(6, Rejudgement("kind-2", None, "no verdict"))])
        after = ledger.transaction.rows("SELECT * FROM payloads")
        assert after[: len(before)] == before
        assert len(after) == len(before) + 2
        assert [verdict.id for verdict in rejudgements(ledger, 6)] == ["strict-1", "kind-2"]
    assert check_ledger(path).damage == []
