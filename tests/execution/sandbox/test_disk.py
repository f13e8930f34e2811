"""A sandbox with a file system of its own: the kernel enforces its disk bound."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from loopwright.execution.sandbox import Bounds, SandboxError, sandbox_of
from loopwright.execution.sandbox import bubblewrap as bwrap
from loopwright.execution.sandbox.disk import SizedDisk, why_not_sized
from loopwright.execution.sandbox.traps import find_traps
from loopwright.testing.sandboxes import SandboxHarness

MIB = 1 << 20
BOUND, SLACK = 32 * MIB, 8 * MIB
pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None or bool(why_not_sized()), reason="needs bubblewrap, and root that can mount"
)


def mounts():
    return [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]


@asynccontextmanager
async def instance_of(harness):
    """An instance over a workspace on a disk of its own; the harness then uses that workspace."""
    async with harness.sandbox.disk(harness.root) as disk:
        harness.workspace = disk / "workspace"
        harness.workspace.mkdir()
        async with harness.sandbox.open(harness.workspace) as instance:
            yield instance


def run(harness, *commands, verify=False):
    """Run commands one after another, the last one as tests."""

    async def main():
        async with instance_of(harness) as instance:
            done = []
            for number, command in enumerate(commands):
                if verify and number == len(commands) - 1:
                    instance.begin_verification()
                done.append(await harness.run(instance, command(harness)))
            return done, instance.exceeded_limit

    return asyncio.run(asyncio.wait_for(main(), 60))


def fill(target, count=64, *, unlink="False", end="sleep(30)"):
    """A command that writes files of one MiB each and prints how much that is together."""
    script = f"""
    import os
    from time import sleep
    files, written = [], 0
    try:
        for number in range({count}):
            name = os.path.expanduser(f"{target}/fill-{{number}}")
            files.append(os.open(name, os.O_WRONLY | os.O_CREAT))
            if {unlink}:
                os.unlink(name)
            written += os.write(files[-1], bytes({MIB}))
            print(written, flush=True)
    except OSError as error:
        print(written, error.strerror, flush=True)
    {end}
    """
    return lambda harness: harness.python(script)


@pytest.mark.parametrize("unlink", ["False", "True"])
@pytest.mark.parametrize("target", [".", "~", "/tmp", "/dev/shm", "/etc"])
def test_a07_the_kernel_enforces_the_disk_bound(tmp_path, monkeypatch, target, unlink):
    """Even if nothing measures: no more is ever written, and files without a name count."""
    monkeypatch.setattr(SizedDisk, "exceeded", lambda *_: None)
    harness = SandboxHarness(tmp_path, sandbox_of("bwrap", Bounds(disk_bytes=BOUND)))
    [done], _ = run(harness, fill(target, unlink=unlink, end=""))
    written, error = harness.stdout.splitlines()[-1].split(maxsplit=1)
    assert (done.exit_code, error) == (0, "No space left on device")
    assert BOUND < int(written) <= BOUND + SLACK
    assert not [mount for mount in mounts() if mount.startswith(str(tmp_path))]


def test_a_command_that_fills_its_disk_is_ended(tmp_path):
    harness = SandboxHarness(tmp_path, sandbox_of("bwrap", Bounds(disk_bytes=BOUND)))
    [done], limit = run(harness, fill(".", unlink="True"))
    assert (done.signal, limit) == (signal.SIGKILL, f"disk: all of {BOUND} bytes")


def last_size(harness):
    return int(harness.stdout.splitlines()[-1].split()[0])


def test_a_disk_within_its_bound_can_be_used_again_and_again(tmp_path):
    """What is deleted is free again, and the commands of an instance share the bound."""
    harness = SandboxHarness(tmp_path, sandbox_of("bwrap", Bounds(disk_bytes=BOUND)))
    again = "".join(f"head -c {BOUND * 3 // 4} /dev/zero > a && rm a || exit; " for _ in range(5))
    done, limit = run(harness, lambda h: h.command(again), fill(".", 16, end=""), fill("/tmp"))
    assert [each.exit_code for each in done[:2]] == [0, 0]
    assert (done[2].signal, limit) == (signal.SIGKILL, f"disk: all of {BOUND} bytes")
    assert last_size(harness) <= BOUND + SLACK - 16 * MIB


def test_tests_have_the_bound_for_themselves(tmp_path):
    """Given an agent that filled its disk, its tests may write as much again, and no more."""
    harness = SandboxHarness(tmp_path, sandbox_of("bwrap", Bounds(disk_bytes=BOUND)))
    (agent, tests), limit = run(harness, fill("."), fill("/tmp", 31, end=""), verify=True)
    assert (agent.signal, tests.exit_code, limit) == (signal.SIGKILL, 0, None)
    assert last_size(harness) == 31 * MIB
    (_, tests), limit = run(harness, fill("."), fill("/tmp"), verify=True)
    assert (tests.signal, limit) == (signal.SIGKILL, f"disk: all of {BOUND} bytes")
    assert last_size(harness) <= BOUND + SLACK


def test_the_files_of_others_are_not_in_reach(tmp_path):
    """Neither the file that keeps space for tests, nor another sandbox's disk, is visible inside."""
    harness = SandboxHarness(tmp_path, sandbox_of("bwrap", Bounds(disk_bytes=BOUND)))
    (tmp_path / "other").mkdir()
    other = SandboxHarness(tmp_path / "other", harness.sandbox)

    async def main():
        async with instance_of(other) as first, instance_of(harness) as second:
            await other.run(first, other.command("echo secret > note"))
            await harness.run(second, harness.command("find / -name note -o -name reserve -not -path '/proc/*'"))
            text = harness.stdout
            await harness.run(second, harness.command("cat /proc/self/mounts"))
            return text, harness.stdout

    found, seen = asyncio.run(asyncio.wait_for(main(), 60))
    assert found == ""
    assert str(other.root) not in seen


def test_space_is_free_again_although_another_sandbox_was_opened_meanwhile(tmp_path):
    """Given a long trial that started during a short one, the short one's disk does not stay in use."""
    harness = SandboxHarness(tmp_path, sandbox_of("bwrap", Bounds(disk_bytes=BOUND)))
    (tmp_path / "other").mkdir()
    other = SandboxHarness(tmp_path / "other", harness.sandbox)

    async def main():
        short = instance_of(other)
        await short.__aenter__()
        device = other.workspace.stat().st_dev
        async with instance_of(harness) as instance:
            await short.__aexit__(None, None, None)
            backing = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/loop/backing_file")
            async with asyncio.timeout(10):
                while backing.exists() and str(other.root) in backing.read_text():
                    await asyncio.sleep(0.05)
            await harness.run(instance, harness.command("echo works > result"))
            return (harness.workspace / "result").read_text()

    assert asyncio.run(main()) == "works\n"


def test_a_full_disk_of_the_machine_is_not_the_agents_fault(tmp_path):
    """Given a machine without space for what the agent wrote, its tests do not run on what is left of it."""
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(small)], check=True)
    try:
        (small / "others").write_bytes(bytes(64 * MIB))
        harness = SandboxHarness(small, sandbox_of("bwrap", Bounds(disk_bytes=32 * MIB)))
        with pytest.raises(SandboxError, match="the machine's disk is full"):
            run(harness, fill(".", 24, end=""), lambda h: h.command("true"), verify=True)
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


def test_a_cancelled_mount_leaves_nothing(tmp_path, monkeypatch):
    original = SizedDisk.mount.__func__

    def slow(cls, *arguments):
        time.sleep(0.3)
        return original(cls, *arguments)

    monkeypatch.setattr(SizedDisk, "mount", classmethod(slow))

    async def main():
        async with asyncio.timeout(0.1), sandbox_of("bwrap", Bounds(disk_bytes=MIB)).disk(tmp_path):
            raise AssertionError("not cancelled")

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert not [mount for mount in mounts() if mount.startswith(str(tmp_path))]


def test_the_disk_of_a_killed_run_is_removed(tmp_path):
    """The reaper unmounts what lies in its directory."""
    script = """
import os, signal, sys
from pathlib import Path
from loopwright.execution.local.reaper import Reaper
from loopwright.execution.sandbox.disk import SizedDisk
reaper = Reaper("disk")
reaper.start()
(SizedDisk.mount(reaper.directory, 1 << 20).path / "file").touch()
print(reaper.directory, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    directory = Path(done.stdout.strip())
    assert (done.returncode, directory.name[:16]) == (-signal.SIGKILL, "loopwright-disk-"), done.stderr
    deadline_s = time.monotonic() + 20
    while directory.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not directory.exists()
    assert not [mount for mount in mounts() if mount.startswith(str(directory))]


def test_without_a_separate_file_system_it_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bwrap, "why_not_sized", lambda: "only root can mount a file system")
    harness = SandboxHarness(tmp_path, sandbox_of("bwrap", Bounds(disk_bytes=BOUND)))
    harness.workspace.rmdir()
    [done], limit = run(harness, fill(".", unlink="True"))
    assert done.signal == signal.SIGKILL
    assert limit.startswith("disk: ")
    assert harness.workspace == tmp_path / "workspace"


def test_an_agent_that_uses_up_all_inodes_cannot_keep_its_tests_from_working(tmp_path):
    """They get no inodes of their own, but the lack of them is found, and the agent's reward is zero."""
    harness = SandboxHarness(tmp_path, sandbox_of("bwrap", Bounds(disk_bytes=MIB)))
    script = """
    try:
        for number in range(10**6):
            open(f"empty-{number}", "w").close()
    except OSError as error:
        print(error.strerror)
    """

    async def main():
        async with instance_of(harness) as instance:
            await harness.run(instance, harness.python(script))
            instance.begin_verification()
            return find_traps(instance, 0)

    assert asyncio.run(main()) == ["a disk with too many files"]


def test_a_bound_may_be_larger_than_the_disk(tmp_path):
    harness = SandboxHarness(tmp_path, sandbox_of("bwrap", Bounds(disk_bytes=1 << 50)))
    [done], limit = run(harness, lambda h: h.command("echo works > result"))
    assert (done.exit_code, limit) == (0, None)
