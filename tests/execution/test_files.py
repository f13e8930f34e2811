"""Untrusted files are read, measured and removed safely."""

import asyncio
import os
import resource
import threading
from pathlib import Path

import pytest

from loopwright.execution import files
from loopwright.execution.files import read_inside, remove, remove_in_background, size_bytes


def test_a_regular_file_is_read_up_to_the_limit(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/reward.txt").write_text("0.75")
    assert read_inside(tmp_path, "logs/reward.txt", 100) == b"0.75"
    assert read_inside(tmp_path, "logs/reward.txt", 3) == b"0.7"


@pytest.mark.parametrize("name", ["link", "folder/secret", "pipe", "logs", "missing", "../secret", "/etc/passwd", ""])
def test_nothing_outside_is_read(tmp_path, name):
    """Given links out of the workspace, a pipe without a writer, and odd names, no file is found."""
    inside = tmp_path / "workspace"
    inside.mkdir()
    (tmp_path / "secret").write_text("key")
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "folder").symlink_to(tmp_path)
    (inside / "logs").mkdir()
    os.mkfifo(inside / "pipe")
    with pytest.raises(FileNotFoundError):
        read_inside(inside, name, 100)


def test_a_device_is_not_read():
    with pytest.raises(FileNotFoundError, match="not a regular file"):
        read_inside(Path("/dev"), "zero", 100)


def test_directories_without_permissions_are_removed(tmp_path):
    root = tmp_path / "workspace"
    (root / "a/b").mkdir(parents=True)
    (root / "a/b/file").touch()
    (root / "a/b").chmod(0)
    (root / "a").chmod(0o500)
    remove(root)
    assert not root.exists()


def test_deeply_nested_directories_are_measured_and_removed(tmp_path):
    root = tmp_path / "workspace"
    root.mkdir()
    directory = os.open(root, os.O_RDONLY)
    for _ in range(2100):
        os.mkdir("d", dir_fd=directory)
        inner = os.open("d", os.O_RDONLY, dir_fd=directory)
        os.close(directory)
        directory = inner
    os.close(directory)
    assert size_bytes(root) is not None
    remove(root)
    assert not root.exists()


def test_links_are_removed_but_not_their_targets(tmp_path):
    root = tmp_path / "workspace"
    root.mkdir()
    (tmp_path / "kept").mkdir()
    (root / "link").symlink_to(tmp_path / "kept")
    remove(root)
    assert (tmp_path / "kept").exists()


def test_a_slow_removal_continues_in_the_background(tmp_path, monkeypatch):
    """Given a directory that takes long, the caller continues, and the directory is removed nevertheless."""
    root, may_remove = tmp_path / "workspace", threading.Event()
    root.mkdir()
    monkeypatch.setattr(files, "remove", lambda path: may_remove.wait(20) and remove(path))

    async def main():
        await remove_in_background(root, wait_s=0.05)
        assert root.exists()
        may_remove.set()
        async with asyncio.timeout(10):
            while root.exists():
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_removing_nested_directories_needs_few_file_descriptors(tmp_path, monkeypatch):
    """Given 500 nested directories and few file descriptors, no external program is needed."""
    root = tmp_path / "workspace"
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
