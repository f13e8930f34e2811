"""What rooms leave behind when something goes wrong, and what they must not show, however late it came."""

import asyncio
import errno
import resource
import tempfile
import threading
from pathlib import Path

import pytest

from loopwright.execution.sandbox import bubblewrap, cgroup, files
from loopwright.execution.sandbox.cgroup import Cgroup
from loopwright.execution.sandbox.files import remove, remove_in_background


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Where control groups are made."""
    (tmp_path / "ours.slice/ours.scope").mkdir(parents=True)
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path)
    (tmp_path / "cgroup").write_text("0::/ours.slice/ours.scope\n")
    monkeypatch.setattr(cgroup, "_OWN_GROUPS", tmp_path / "cgroup")
    return tmp_path / "ours.slice"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The temporary directory."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def test_a_group_whose_processes_would_not_go_is_removed_later(groups, monkeypatch):
    monkeypatch.setattr(cgroup, "_TRIES", 1)
    asyncio.run(Cgroup.create("room-1", 40).close())
    assert (groups / "room-1").exists()
    (groups / "room-1/pids.max").unlink()
    Cgroup.create("room-2", 40)
    assert not (groups / "room-1").exists()


def test_a_group_of_a_killed_process_is_removed(groups, temporary):
    gone = groups / "loopwright-sandbox-999999999-1-abc"
    gone.mkdir()
    bubblewrap.remove_stale.__wrapped__()
    assert not gone.exists()


def test_a_room_that_cannot_be_begun_leaves_nothing(temporary, monkeypatch):
    """Given a disk that is full, then what was written until then is removed."""

    def full(_moment):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(bubblewrap, "_secrets", full)
    with pytest.raises(OSError, match="no space"):
        bubblewrap._Scratch.create("", ())
    assert list(temporary.iterdir()) == []


def test_what_takes_long_to_remove_is_not_waited_for(tmp_path, monkeypatch):
    """Given a directory that takes long, then whoever wants it removed goes on, and it is removed all the same."""
    root, may = tmp_path / "room", threading.Event()
    root.mkdir()
    monkeypatch.setattr(files, "remove", lambda path: may.wait(20) and remove(path))

    async def main():
        await remove_in_background(root, wait_s=0.05)
        assert root.exists()
        may.set()
        async with asyncio.timeout(10):
            while root.exists():
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_removing_what_lies_deep_takes_no_more_files_than_there_are(tmp_path, monkeypatch):
    """Given 500 directories in one another, and few files that we may open, then no other program is needed."""
    root = tmp_path / "room"
    Path(root, *["d"] * 500).mkdir(parents=True)
    (root / "d/d/link").symlink_to(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").touch()
    (tmp_path / "link").symlink_to("kept")
    monkeypatch.setattr(files.subprocess, "run", None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 50, hard))
    try:
        remove(root)
        remove(tmp_path / "link")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert list(tmp_path.iterdir()) == [tmp_path / "kept"]
    assert (tmp_path / "kept/file").exists()


def test_what_is_not_for_everybody_is_found(tmp_path):
    """Given a directory for everybody, then a key in it and a directory that is closed are found, and links are not."""
    (tmp_path / "ssl").mkdir()
    (tmp_path / "ssl/certificate").touch()
    (tmp_path / "ssl/key").touch(mode=0o600)
    (tmp_path / "link").symlink_to("ssl/key")
    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "closed/file").touch()
    assert set(bubblewrap.unreadable_paths(str(tmp_path))) == {tmp_path / "ssl/key", tmp_path / "closed"}


def test_a_secret_that_comes_while_we_run_is_hidden_too(temporary, monkeypatch):
    """Given a new key in /etc, then a room that is made ten seconds later does not show it."""
    found, now = [Path("/etc/shadow")], [1000.0]
    monkeypatch.setattr(bubblewrap, "unreadable_paths", lambda _: iter(found))
    monkeypatch.setattr(bubblewrap.time, "monotonic", lambda: now[0])
    bubblewrap._secrets.cache_clear()
    try:
        assert bubblewrap._Scratch.create("", ()).secrets == tuple(found)
        found.append(Path("/etc/key"))
        now[0] += 10
        made = bubblewrap._Scratch.create("", ())
        assert made.secrets == tuple(found)
        assert (made.path / "upper/etc/key").stat().st_mode & 0o777 == 0
    finally:
        bubblewrap._secrets.cache_clear()
