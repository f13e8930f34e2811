"""The ledger: reserved, attempted, committed, and the same after it was closed, killed or read from elsewhere."""

import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwright.core.errors import LedgerError, StorageError
from loopwright.core.outcome import REUSABLE, Fault, Outcome
from loopwright.core.trial import Result, Reward, Trial
from loopwright.ledger.ledger import Ledger


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger(path):
    with Ledger.create(path) as ledger:
        yield ledger


def trial(number: int = 1, **more) -> Trial:
    return replace(Trial(number=number, action={"x": number}, key=f"key-{number}", group=number), **more)


def test_a_reserved_trial_is_in_flight_until_it_is_committed(ledger):
    ledger.reserve([trial()])
    assert ledger.trial(1).outcome is None
    assert [found.number for found in ledger.unfinished()] == [1]
    result = Result(Outcome.OK, {"y": 2.5}, usage={"wall_s": 0.1}, reward=Reward(2.5, {"y": 2.5}))
    ended = ledger.commit(trial(), result)
    assert ledger.trial(1) == ended
    assert ledger.unfinished() == []
    assert (ended.outcome, ended.reward, dict(ended.metrics)) == (Outcome.OK, Reward(2.5, {"y": 2.5}), {"y": 2.5})


def test_a_failed_trial_has_a_fault_and_a_reason_and_nothing_to_learn_from(ledger):
    ledger.reserve([trial()])
    ledger.commit(trial(), Result(Outcome.CRASHED, {"y": 1.0}, reason="exit code 3"))
    found = ledger.trial(1)
    assert (found.outcome, found.fault, found.reason) == (Outcome.CRASHED, Fault.WORKLOAD, "exit code 3")
    assert (found.reward, dict(found.metrics)) == (None, {})


def test_a_number_is_given_out_once(ledger):
    ledger.reserve([trial(1)])
    with pytest.raises(LedgerError):
        ledger.reserve([trial(2), trial(1)])
    assert [found.number for found in ledger.trials()] == [1]


def test_a_trial_is_committed_once(ledger):
    ledger.reserve([trial()])
    ledger.commit(trial(), Result(Outcome.OK, {"y": 1.0}))
    with pytest.raises(LedgerError, match="trial 1 was never reserved, or is finished already"):
        ledger.commit(trial(), Result(Outcome.CRASHED))
    assert ledger.trial(1).outcome is Outcome.OK


def test_a_trial_that_was_never_reserved_cannot_be_committed(ledger):
    with pytest.raises(LedgerError, match="never reserved"):
        ledger.commit(trial(), Result(Outcome.OK))


def test_an_aborted_trial_is_unfinished_and_can_be_committed_again(ledger):
    ledger.reserve([trial()])
    ledger.commit(trial(), Result(Outcome.ABORTED))
    assert [found.number for found in ledger.unfinished()] == [1]
    assert ledger.commit(trial(), Result(Outcome.OK, {"y": 1.0})).outcome is Outcome.OK


def test_attempts_are_counted_and_end_with_their_trial(ledger):
    ledger.reserve([trial()])
    assert ledger.attempt(1, "100:5") == 1
    ledger.commit(trial(), Result(Outcome.ABORTED))
    assert ledger.attempt(1, "101:6") == 2
    assert ledger.open_attempts() == {1: (2, "101:6")}
    ledger.commit(trial(), Result(Outcome.OK))
    assert ledger.open_attempts() == {}
    assert [(number, outcome) for number, _, _, outcome in ledger.attempts(1)] == [(1, "aborted"), (2, "ok")]


def test_an_attempt_that_moves_to_another_process_stays_one_attempt(ledger):
    ledger.reserve([trial()])
    assert (ledger.attempt(1, "100:5"), ledger.attempt(1, "200:6")) == (1, 1)
    assert ledger.open_attempts() == {1: (1, "200:6")}


def test_what_a_dead_process_left_open_is_lost_but_its_trial_is_not(ledger):
    ledger.reserve([trial()])
    ledger.attempt(1, "100:5")
    ledger.close_attempts([1])
    assert [outcome for _, _, _, outcome in ledger.attempts(1)] == ["lost"]
    assert [found.number for found in ledger.unfinished()] == [1]


@pytest.mark.parametrize("outcome", list(Outcome))
def test_only_reusable_outcomes_answer_a_key(ledger, outcome):
    ledger.reserve([trial()])
    ledger.commit(trial(), Result(outcome))
    assert (ledger.find("key-1") is not None) == (outcome in REUSABLE)


def test_a_copy_from_the_cache_is_not_the_source_of_another(ledger):
    ledger.reserve([trial(1), trial(2, key="key-1")])
    ledger.commit(trial(2, key="key-1"), Result(Outcome.OK, {"y": 1.0}, cached_from="7"))
    assert ledger.find("key-1") is None
    ledger.commit(trial(1), Result(Outcome.OK, {"y": 1.0}))
    assert ledger.find("key-1").number == 1
    assert ledger.counts() == {"ok": 2, "cached": 1}


def test_payloads_notes_and_state_are_kept(ledger):
    ledger.reserve([trial()], note={"retries": 2})
    ledger.put_payload(1, "episode", b"\0\xff")
    ledger.set_state("run", {"name": "matmul"})
    ledger.set_state("run", {"name": "fft"})
    assert ledger.payload(1, "episode") == b"\0\xff"
    assert ledger.payload(1, "other") is None
    assert ledger.notes() == {1: {"retries": 2}}
    assert ledger.state("run") == {"name": "fft"}
    assert ledger.state("other", 5) == 5


def test_a_resumed_run_continues_from_the_last_numbers(ledger):
    assert ledger.last() == (0, 0, 0)
    ledger.reserve([trial(1, group=1, draw=1), trial(2, group=1, draw=1)])
    ledger.reserve([trial(3, group=2)])
    assert ledger.last() == (3, 2, 1)
    assert [found.number for found in ledger.group(1)] == [1, 2]


def test_trials_come_in_pages_without_gap(ledger):
    ledger.reserve([trial(number) for number in range(1, 10_002)])
    assert [found.number for found in ledger.trials()] == list(range(1, 10_002))
    assert [found.number for found in ledger.trials(after=9_999)] == [10_000, 10_001]


def test_what_json_does_not_know_is_recorded_all_the_same(ledger):
    ledger.reserve([trial(action={"x": {1, 2}, 5: 1.0})])
    assert ledger.trial(1).action == {"x": "{1, 2}", "5": 1.0}


def test_several_threads_write_and_read_at_the_same_time(path, ledger):
    """Given eight threads over one ledger, each with its own trials, nothing is lost and nothing torn."""
    failures = []

    def work(thread: int) -> None:
        try:
            for number in range(thread * 100 + 1, thread * 100 + 26):
                ledger.reserve([trial(number)])
                ledger.attempt(number, f"{number}:1")
                ledger.commit(trial(number), Result(Outcome.OK, {"y": float(number)}, reward=Reward(float(number))))
                assert ledger.find(f"key-{number}").number == number
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert ledger.counts() == {"ok": 200, "cached": 0}
    assert all(found.reward == Reward(float(found.number)) for found in ledger.trials())


READER = """
import sys
from pathlib import Path
from loopwright.ledger.ledger import Ledger

with Ledger.read(Path(sys.argv[1])) as ledger:
    for _ in sys.stdin:
        print(len(list(ledger.trials())), ledger.counts().get("ok", 0), flush=True)
"""


def test_another_process_reads_beside_the_writer(path, ledger):
    """Neither waits for the other, and the reader sees what is committed."""
    with subprocess.Popen(
        [sys.executable, "-c", READER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:

        def seen() -> str:
            reader.stdin.write("\n")
            reader.stdin.flush()
            return reader.stdout.readline()

        assert seen() == "0 0\n"
        ledger.reserve([trial(1), trial(2)])
        assert seen() == "2 0\n"
        ledger.commit(trial(1), Result(Outcome.OK))
        assert seen() == "2 1\n"
    assert reader.returncode == 0


def test_a_reader_cannot_write(path, ledger):
    with Ledger.read(path) as reader, pytest.raises(LedgerError, match="readonly"):
        reader.reserve([trial()])


def test_an_existing_ledger_is_not_created_again(path, ledger):
    with pytest.raises(LedgerError, match="exists already"):
        Ledger.create(path)


def test_a_ledger_that_a_crash_left_half_created_is_not_a_ledger(path):
    """Killed before the ledger was in place, a run begins as if nothing had been."""
    path.with_name(f".{path.name}.part").write_bytes(b"half a ledger")
    path.with_name(f".{path.name}.part-wal").write_bytes(b"half a log")
    with Ledger.create(path, state={"id": "abc"}) as ledger:
        assert ledger.state("id") == "abc"
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name, "ledger.head"]


def test_a_ledger_in_a_directory_that_is_not_there_is_an_error_with_its_path(tmp_path):
    with pytest.raises(StorageError, match="nowhere"):
        Ledger.create(tmp_path / "nowhere" / "ledger.db")


@pytest.mark.parametrize("opener", [Ledger.open, Ledger.read])
class TestAFileThatIsNotWhatItShouldBe:
    def test_a_missing_file_is_refused(self, path, opener):
        with pytest.raises(LedgerError, match="no ledger at"):
            opener(path)

    def test_another_format_is_refused(self, path, opener):
        path.write_bytes(b"this is a letter, not a ledger. " * 200)
        with pytest.raises(LedgerError, match="is damaged"):
            opener(path)

    def test_an_empty_file_is_refused(self, path, opener):
        path.touch()
        with pytest.raises(LedgerError, match="is not a ledger"):
            opener(path)

    def test_a_newer_version_is_refused(self, path, opener):
        Ledger.create(path).close()
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA user_version = 99")
        with pytest.raises(LedgerError, match="has version 99; this Loopwright reads 6"):
            opener(path)


def test_damage_in_the_middle_is_found_before_a_run_continues(path):
    with Ledger.create(path) as ledger:
        ledger.reserve([trial(number) for number in range(1, 2001)])
    content = bytearray(path.read_bytes())
    content[8192:40960] = b"\xa5" * (40960 - 8192)
    path.write_bytes(content)
    with pytest.raises(LedgerError, match=r"(?s)is damaged .*\.recover"):
        Ledger.open(path)
    assert path.read_bytes() == content


numbers = st.floats(allow_nan=False, allow_infinity=False)
rewards = st.none() | st.builds(
    Reward, numbers, st.dictionaries(st.text(max_size=3), numbers, max_size=2), st.tuples(numbers) | st.just(())
)
results = st.builds(
    Result,
    outcome=st.sampled_from(Outcome),
    metrics=st.dictionaries(st.text(max_size=5), numbers, max_size=3),
    reason=st.text(max_size=20),
    usage=st.dictionaries(st.sampled_from(["wall_s", "user_s"]), numbers),
    cached_from=st.none() | st.text(max_size=5),
    reward=rewards,
)
scalars = st.integers(-(2**63), 2**63 - 1) | numbers | st.booleans() | st.text(max_size=10)
tables = st.dictionaries(st.text(max_size=5), scalars, max_size=3)
operations = st.lists(
    st.tuples(st.just("reserve"), tables, tables, st.integers(1, 3), st.none() | tables)
    | st.tuples(st.just("commit"), st.integers(0, 50), results)
    | st.tuples(st.just("attempt"), st.integers(0, 50))
    | st.tuples(st.just("payload"), st.integers(0, 50), st.binary(max_size=10))
    | st.tuples(st.just("state"), st.sampled_from("abc"), tables)
    | st.tuples(st.just("reopen")),
    max_size=25,
)


class Model:
    """What a ledger should hold, in plain dictionaries."""

    def __init__(self) -> None:
        self.trials, self.attempts, self.payloads, self.state, self.notes = {}, {}, {}, {}, {}

    def apply(self, ledger: Ledger, operation: tuple) -> None:
        match operation:
            case "reserve", action, regime, size, note:
                first, group = len(self.trials) + 1, len({t.group for t in self.trials.values()}) + 1
                made = [trial(n, action=action, regime=regime, group=group) for n in range(first, first + size)]
                ledger.reserve(made, note)
                self.trials |= {each.number: each for each in made}
                self.notes |= {first: note} if note is not None else {}
            case "commit", number, result if number in self.trials and self.trials[number].unfinished:
                self.trials[number] = ledger.commit(self.trials[number], result)
            case "attempt", number if number in self.trials:
                self.attempts[number] = ledger.attempt(number, "1:1")
            case "payload", number, data if number in self.trials:
                ledger.put_payload(number, "data", data)
                self.payloads[number] = data
            case "state", name, value:
                ledger.set_state(name, value)
                self.state[name] = value

    def check(self, ledger: Ledger) -> None:
        assert list(ledger.trials()) == list(self.trials.values())
        assert [found.number for found in ledger.unfinished()] == [n for n, t in self.trials.items() if t.unfinished]
        assert {number: len(ledger.attempts(number)) for number in self.attempts} == self.attempts
        assert {number: ledger.payload(number, "data") for number in self.payloads} == self.payloads
        assert {name: ledger.state(name) for name in self.state} == self.state
        assert ledger.notes() == self.notes


@settings(max_examples=60, deadline=None)
@given(operations)
def test_whatever_was_written_is_read_back_after_reopening(operations):
    with tempfile.TemporaryDirectory() as directory:
        path, model = Path(directory) / "ledger.db", Model()
        ledger = Ledger.create(path)
        for operation in operations:
            if operation == ("reopen",):
                ledger.close()
                ledger = Ledger.open(path)
            model.apply(ledger, operation)
        model.check(ledger)
        ledger.close()
        with Ledger.read(path) as reader:
            model.check(reader)


def test_only_its_owner_can_read_a_private_ledger(tmp_path):
    umask = os.umask(0)
    try:
        with Ledger.create(tmp_path / "ledger.db", private=True) as ledger:
            ledger.set_state("x", 1)
            modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.glob("ledger.db*")}
    finally:
        os.umask(umask)
    assert {"ledger.db", "ledger.db-wal", "ledger.db-shm"} <= set(modes)
    assert {modes[f"ledger.db{end}"] for end in ("", "-wal", "-shm")} == {0o600}
