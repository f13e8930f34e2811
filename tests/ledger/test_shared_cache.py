"""The shared cache: measurements that several runs may use."""

import pytest

from loopwright.core.errors import LedgerError
from loopwright.ledger.shared_cache import SharedCache


@pytest.fixture
def path(tmp_path):
    return tmp_path / "below" / "cache.db"


def test_what_one_run_measured_another_one_finds(path):
    one, other = SharedCache(path), SharedCache(path)
    one.put("key", "out/matmul#3", {"gflops": 2.5})
    assert other.find("key") == ("out/matmul#3", {"gflops": 2.5})
    one.close()
    other.close()


def test_it_outlives_the_run(path):
    cache = SharedCache(path)
    cache.put("key", "a#1", {"y": 1})
    cache.close()
    reopened = SharedCache(path)
    assert reopened.find("key") == ("a#1", {"y": 1})
    reopened.close()


def test_the_first_measurement_stays(path):
    cache = SharedCache(path)
    cache.put("key", "a#1", {"y": 1})
    cache.put("key", "b#1", {"y": 2})
    assert cache.find("key") == ("a#1", {"y": 1})
    cache.close()


def test_what_nobody_measured_is_not_there(path):
    cache = SharedCache(path)
    assert cache.find("key") is None
    cache.close()


def test_a_file_that_is_not_a_cache_is_named(path):
    path.parent.mkdir()
    path.write_bytes(b"something else entirely " * 100)
    with pytest.raises(LedgerError, match=r"cache\.db is damaged"):
        SharedCache(path)
