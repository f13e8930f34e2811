"""Bubblewrap isolates commands; what is missing is reported, and killed processes leave nothing."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
from tests.execution.sandbox.fake_docker import write_script

from loopwright.execution.local.processes import start_ticks
from loopwright.execution.sandbox import Bounds, SandboxError, bubblewrap, cgroup, sandbox_of
from loopwright.execution.sandbox.bubblewrap import remove_stale
from loopwright.testing import IsolationContract
from loopwright.testing.sandboxes import SandboxHarness

NO_BOUNDS = Bounds()


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The temporary directory."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


class TestBubblewrap(IsolationContract):
    def make_sandbox(self, bounds=NO_BOUNDS):
        return sandbox_of("bwrap", bounds)


def test_missing_bubblewrap_is_reported_with_the_fix(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        sandbox_of("bwrap").check()


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("bwrap: No permissions to create new namespace", "user.max_user_namespaces"),
        ("bwrap: Unknown option --disable-userns", "0.8 or newer"),
    ],
)
def test_missing_user_namespaces_are_reported_with_the_fix(tmp_path, monkeypatch, message, advice):
    write_script(tmp_path / "bwrap", f"echo '{message}' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match=message) as caught:
        sandbox_of("bwrap").check()
    assert advice in str(caught.value)


def test_readable_directories_must_exist(tmp_path):
    with pytest.raises(SandboxError, match="no-such-directory"):
        sandbox_of("bwrap", readable=(tmp_path / "no-such-directory",)).check()


def test_readable_directories_are_visible_and_read_only(tmp_path):
    """Given an agent in its own directory, that directory is visible and its neighbours are not."""
    agent = tmp_path / "agents" / "mine"
    agent.mkdir(parents=True)
    write_script(agent / "agent", "echo working")
    (tmp_path / "agents" / "other").write_text("hidden")
    (tmp_path / "trial").mkdir()
    harness = SandboxHarness(tmp_path / "trial", sandbox_of("bwrap", readable=(agent,)))
    output = harness.output_of(harness.command('"$1"/agent; touch "$1"/x; ls "$1"/..; exit 0', str(agent)))
    assert output == "working\nmine\n"
    assert not (agent / "x").exists()


def test_scratch_directories_of_killed_processes_are_removed(tmp_path, monkeypatch):
    """Given directories of a process that is gone and of ours, only the first is removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = tmp_path / "loopwright-sandbox-999999999-1-abc"
    ours = tmp_path / f"loopwright-sandbox-{os.getpid()}-{start_ticks(os.getpid())}-abc"
    gone.mkdir()
    ours.mkdir()
    remove_stale.__wrapped__()
    assert (gone.exists(), ours.exists()) == (False, True)


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """The directory for new control groups."""
    (tmp_path / "ours.slice/ours.scope").mkdir(parents=True)
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path)
    (tmp_path / "cgroup").write_text("0::/ours.slice/ours.scope\n")
    monkeypatch.setattr(cgroup, "_OWN_GROUPS", tmp_path / "cgroup")
    return tmp_path / "ours.slice"


def test_control_groups_of_killed_processes_are_removed(groups, temporary):
    gone = groups / "loopwright-sandbox-999999999-1-abc"
    gone.mkdir()
    bubblewrap.remove_stale.__wrapped__()
    assert not gone.exists()


def test_an_instance_that_cannot_be_created_leaves_nothing(temporary, monkeypatch):
    """Given a full disk, what was written until then is removed."""

    def full(_moment):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(bubblewrap, "_secrets", full)
    with pytest.raises(OSError, match="no space"):
        bubblewrap._Scratch.create("", ())
    assert list(temporary.iterdir()) == []


def test_unreadable_paths_are_listed(tmp_path):
    """Given a readable directory, a private key and a private directory in it are listed, and links are not."""
    (tmp_path / "ssl").mkdir()
    (tmp_path / "ssl/certificate").touch()
    (tmp_path / "ssl/key").touch(mode=0o600)
    (tmp_path / "link").symlink_to("ssl/key")
    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "closed/file").touch()
    assert set(bubblewrap.unreadable_paths(str(tmp_path))) == {tmp_path / "ssl/key", tmp_path / "closed"}


def test_a_new_secret_is_hidden_after_ten_seconds(temporary, monkeypatch):
    """Given a new key in /etc, an instance that is opened ten seconds later does not show it."""
    secrets, now = [Path("/etc/shadow")], [1000.0]
    monkeypatch.setattr(bubblewrap, "unreadable_paths", lambda _: iter(secrets))
    monkeypatch.setattr(bubblewrap.time, "monotonic", lambda: now[0])
    bubblewrap._secrets.cache_clear()
    try:
        assert bubblewrap._Scratch.create("", ()).secrets == tuple(secrets)
        secrets.append(Path("/etc/key"))
        now[0] += 10
        scratch = bubblewrap._Scratch.create("", ())
        assert scratch.secrets == tuple(secrets)
        assert (scratch.path / "upper/etc/key").stat().st_mode & 0o777 == 0
    finally:
        bubblewrap._secrets.cache_clear()
