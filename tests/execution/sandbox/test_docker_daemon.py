"""Docker sandboxes against a real daemon: the contract of sandboxes, and the attempts to escape."""

import asyncio
import sys
from pathlib import Path

import pytest

from loopwright.execution.sandbox import Bounds, sandbox_of
from loopwright.testing import IsolationContract

NO_BOUNDS = Bounds()


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first one makes the base image
@pytest.mark.usefixtures("docker_daemon")
class TestDockerDaemon(IsolationContract):
    """All but what an image's own files decide. Bounds on CPU and disk are refused."""

    def make_sandbox(self, bounds=NO_BOUNDS):
        return sandbox_of("docker", bounds, (Path(sys.prefix), Path(sys.base_prefix)))

    test_cpu_time_is_bounded_in_total = None
    test_disk_usage_is_bounded = None
    test_an_unreadable_directory_does_not_evade_the_disk_bound = None
    test_unlinked_files_do_not_evade_the_disk_bound = None

    test_hidden_directories_are_empty = None  # /usr/share/doc is the image's own

    def test_memory_is_bounded_in_total(self, harness):
        """The kernel ends one of the processes, whichever it chooses; the bound is named all the same."""
        self.set_bounds(harness, Bounds(memory_bytes=200 << 20))
        script = "import os, time; os.fork(); os.fork(); x = b'x' * (80 << 20); time.sleep(5)"
        harness.run_all(harness.python(script))
        assert harness.exceeded_limit.startswith("memory:")

    def test_the_ledger_and_the_home_are_invisible(self, harness):
        """Accounts are the image's own."""
        script = 'cat "$1" /proc/1/root"$1" /proc/self/root"$1"; ls -A ~/.ssh; true'
        assert harness.output_of(harness.command(script, str(harness.output / "ledger"))) == ""

    def test_a_link_in_a_system_directory_does_not_redirect_a_mount(self, harness):
        """Docker resolves it inside the container."""
        victim = harness.root / "victim"
        victim.mkdir()

        async def main():
            async with harness.sandbox.open(harness.workspace) as instance:
                await harness.run(instance, harness.command('ln -s "$1" /usr/new', f"../../../..{victim}"))
                await harness.run(instance, harness.command("true"), {"/usr/new/logs": harness.output})

        asyncio.run(main())
        assert list(victim.iterdir()) == []

    def test_a_command_continues_with_what_the_last_one_left(self, harness):
        """Also outside the workspace, as in one long-lived container."""
        harness.run_all(
            harness.command("echo installed > /usr/local/tool; sleep 1000 & exit 0"),
            harness.command("cat /usr/local/tool; exit 3"),
        )
        assert harness.stdout == "installed\n"

    def test_changes_of_the_system_are_noticed(self, harness):
        """Not what Docker itself puts there."""

        async def main(script):
            async with harness.sandbox.open(harness.workspace) as instance:
                await harness.run(instance, harness.command(script))
                instance.begin_verification()
                return instance.has_changed_system()

        assert [asyncio.run(main(script)) for script in ("echo 1 > a", "echo 1 > /etc/a")] == [False, True]
