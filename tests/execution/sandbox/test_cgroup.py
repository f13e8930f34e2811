"""Control groups limit processes and memory where they are available, and are removed."""

import asyncio

import pytest

from loopwright.execution.sandbox import cgroup
from loopwright.execution.sandbox.cgroup import Cgroup

LIMITS = {"pids": 40, "memory": 1 << 20}


@pytest.fixture
def own_groups(tmp_path, monkeypatch):
    """Sets the groups that our own process is in."""

    def set_groups(*lines):
        for line in lines:
            controllers, path = line.split(":")[1:]
            (tmp_path / controllers / path.strip("/")).mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(cgroup, "_ROOT", tmp_path)
        (tmp_path / "own").write_text("".join(f"{line}\n" for line in lines))
        monkeypatch.setattr(cgroup, "_OWN_GROUPS", tmp_path / "own")
        return tmp_path

    return set_groups


def empty(group):
    """In a real cgroup file system, the kernel removes these files with the directory."""
    for file in group.iterdir():
        file.unlink()


def test_version_2_groups_are_created_beside_our_own(own_groups):
    """Given a slice that is delegated to us, one group in it has all limits, and is removed at the end."""
    root = own_groups("0::/user.slice/ours.scope")
    group = Cgroup.create("group-1", LIMITS)
    path = root / "user.slice/group-1"
    assert {file.name: file.read_text() for file in path.iterdir()} == {"pids.max": "40", "memory.max": "1048576"}
    assert group.join_files == (str(path / "cgroup.procs"),)
    assert group.limits("memory")
    empty(path)
    asyncio.run(group.close())
    assert not path.exists()


def test_version_2_memory_has_no_swap_and_ends_all_processes_together(own_groups):
    root = own_groups("0::/user.slice/ours.scope")
    path = root / "user.slice/group-1"
    path.mkdir()
    for name in ("memory.swap.max", "memory.oom.group"):
        (path / name).touch()
    Cgroup.create("group-1", {"memory": 5000})
    assert ((path / "memory.swap.max").read_text(), (path / "memory.oom.group").read_text()) == ("0", "1")


def test_version_1_has_a_group_for_each_limit_inside_our_own(own_groups):
    root = own_groups("4:memory:/api/ours", "8:pids:/", "0::/")
    (root / "memory/api/ours/group-1").mkdir()
    (root / "memory/api/ours/group-1/memory.memsw.limit_in_bytes").touch()
    group = Cgroup.create("group-1", LIMITS)
    memory, pids = root / "memory/api/ours/group-1", root / "pids/group-1"
    assert (pids / "pids.max").read_text() == "40"
    assert (memory / "memory.limit_in_bytes").read_text() == "1048576"
    assert (memory / "memory.memsw.limit_in_bytes").read_text() == "1048576"
    assert {*group.join_files} == {str(pids / "cgroup.procs"), str(memory / "cgroup.procs")}


@pytest.mark.parametrize(
    ("name", "text"), [("memory.events", "oom 3\noom_kill 2\n"), ("memory.oom_control", "oom_kill 2")]
)
def test_processes_that_the_kernel_ended_are_counted(own_groups, name, text):
    root = own_groups("0::/user.slice/ours.scope")
    group = Cgroup.create("group-1", LIMITS)
    assert group.kills() == 0
    (root / "user.slice/group-1" / name).write_text(text)
    assert group.kills() == 2


def test_a_limit_that_is_not_delegated_is_left_to_the_monitor(own_groups):
    """Given a directory where the memory limit cannot be written, the other one is set."""
    root = own_groups("0::/user.slice/ours.scope")
    (root / "user.slice/group-1/memory.max").mkdir(parents=True)
    group = Cgroup.create("group-1", LIMITS)
    assert (group.limits("pids"), group.limits("memory")) == (True, False)


def test_without_a_cgroup_file_system_there_is_no_group(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path / "nowhere")
    group = Cgroup.create("group-1", LIMITS)
    assert (group.join_files, group.kills()) == ((), 0)
    asyncio.run(group.close())


def test_a_group_with_running_processes_is_removed_later(own_groups, monkeypatch):
    monkeypatch.setattr(cgroup, "_TRIES", 1)
    root = own_groups("0::/user.slice/ours.scope")
    asyncio.run(Cgroup.create("group-1", LIMITS).close())
    assert (root / "user.slice/group-1").exists()
    empty(root / "user.slice/group-1")
    Cgroup.create("group-2", LIMITS)
    assert not (root / "user.slice/group-1").exists()
