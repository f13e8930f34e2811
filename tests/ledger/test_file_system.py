"""Ledgers on network file systems, where SQLite's write-ahead log does not work."""

import pytest

from loopwright.core.outcome import Outcome
from loopwright.core.trial import Result, Trial
from loopwright.ledger import sqlite as module
from loopwright.ledger.check import check_ledger
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.sqlite import NETWORK, file_system


@pytest.fixture
def on_nfs(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"disk / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\nserver:/y {tmp_path}/a\\040b cifs rw 0 0\n"
    )
    monkeypatch.setattr(module, "MOUNTS", mounts)
    return tmp_path


def test_the_longest_mount_point_counts(on_nfs):
    assert [file_system(path) for path in (on_nfs / "out", on_nfs / "a b" / "c", on_nfs.parent)] == [
        "nfs4",
        "cifs",
        "ext4",
    ]
    for kind in ("nfs4", "fuse.sshfs", "lustre"):
        assert kind.startswith(NETWORK)
    for kind in ("ext4", "overlay", ""):
        assert not kind.startswith(NETWORK)


def test_a_ledger_on_nfs_has_a_rollback_journal_and_survives_reopening(on_nfs):
    path = on_nfs / "ledger.db"
    with Ledger.create(path) as ledger:
        trial = Trial(1, {"x": 1}, "key", group=1, reserved_at=0.0)
        ledger.reserve([trial])
        ledger.commit(trial, Result(Outcome.OK, {"y": 1.0}))
        ledger.flush()
        assert not path.with_name("ledger.db-wal").exists()
        with Ledger.read(path) as reader:  # while it is open
            assert [each.outcome for each in reader.trials()] == [Outcome.OK]
    with Ledger.open(path) as ledger:
        assert ledger.last()[0] == 1
    assert check_ledger(path).damage == []
