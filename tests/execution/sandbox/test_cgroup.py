"""Control groups limit processes where they are available, and are removed."""

import asyncio

import pytest

from loopwright.execution.sandbox import cgroup
from loopwright.execution.sandbox.cgroup import Cgroup


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """The directory for new control groups."""
    (tmp_path / "ours.slice/ours.scope").mkdir(parents=True)
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path)
    (tmp_path / "cgroup").write_text("0::/ours.slice/ours.scope\n")
    monkeypatch.setattr(cgroup, "_OWN_GROUPS", tmp_path / "cgroup")
    return tmp_path / "ours.slice"


def test_version_2_groups_are_created_beside_our_own(tmp_path, monkeypatch):
    """Given a slice that is delegated to us, a group is created in it, and removed at the end."""
    (tmp_path / "user.slice/ours.scope").mkdir(parents=True)
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path)
    (tmp_path / "cgroup").write_text("0::/user.slice/ours.scope\n")
    monkeypatch.setattr(cgroup, "_OWN_GROUPS", tmp_path / "cgroup")
    group = Cgroup.create("group-1", 40)
    assert (tmp_path / "user.slice/group-1/pids.max").read_text() == "40"
    assert group.join_file == str(tmp_path / "user.slice/group-1/cgroup.procs")
    # In a real cgroup file system, the kernel removes these files with the directory.
    (tmp_path / "user.slice/group-1/pids.max").unlink()
    asyncio.run(group.close())
    assert not (tmp_path / "user.slice/group-1").exists()


def test_without_a_cgroup_file_system_there_is_no_group(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path / "nowhere")
    group = Cgroup.create("group-1", 40)
    assert group.join_file == ""
    asyncio.run(group.close())


def test_a_group_with_running_processes_is_removed_later(groups, monkeypatch):
    monkeypatch.setattr(cgroup, "_TRIES", 1)
    asyncio.run(Cgroup.create("group-1", 40).close())
    assert (groups / "group-1").exists()
    (groups / "group-1/pids.max").unlink()
    Cgroup.create("group-2", 40)
    assert not (groups / "group-1").exists()
