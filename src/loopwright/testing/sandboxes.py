"""The contract of every sandbox, as tests, and a harness to run scripts in one. `IsolationContract` tries to escape."""
# ruff: noqa: S101, PTH  These are tests, although they are part of the package.

import asyncio
import os
import signal
import sys
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from loopwright.execution.base import Command, Completion
from loopwright.execution.files import remove
from loopwright.execution.local.executor import LocalExecutor
from loopwright.execution.sandbox import Bounds, Sandbox, SandboxInstance
from loopwright.execution.sandbox.base import NO_MOUNTS
from loopwright.testing.executors import DEADLINE_S, ignore

MIB = 1 << 20
run_number = iter(range(1, 1 << 30))


class SandboxHarness:
    """A workspace, files outside it, and methods to run scripts in a sandbox."""

    def __init__(self, root: Path, sandbox: Sandbox) -> None:
        self.root, self.sandbox = root, sandbox
        self.workspace, self.output = root / "workspace", root / "output"
        self.workspace.mkdir()
        self.output.mkdir()
        (self.output / "ledger").write_text("precious")
        self.allowed_urls: tuple[str, ...] = ()
        self.mount_at: str | None = None
        self.hide: tuple[Path, ...] = ()
        self.exceeded_limit: str | None = None

    def command(self, script: str, *arguments: str, timeout_s: float = DEADLINE_S) -> Command:
        """A shell script as a command."""
        return Command(
            argv=("/bin/sh", "-c", script, "script", *arguments),
            directory=self.workspace,
            environment={"PATH": "/usr/bin:/bin"},
            stdout=self.output / "stdout",
            stderr=self.output / "stderr",
            timeout_s=timeout_s,
            marker=f"sandbox-{os.getpid()}-{next(run_number)}",
        )

    def python(self, script: str, *arguments: str, timeout_s: float = DEADLINE_S) -> Command:
        """A Python script as a command, for our own interpreter, which is visible in sandboxes."""
        argv = (sys.executable, "-IS", "-c", textwrap.dedent(script), *arguments)
        return replace(self.command("", timeout_s=timeout_s), argv=argv)

    async def run(
        self,
        instance: SandboxInstance,
        command: Command,
        mounts: Mapping[str, Path] = NO_MOUNTS,
        read_only: Mapping[str, Path] = NO_MOUNTS,
    ) -> Completion:
        """Run one command in an open sandbox."""
        executor = LocalExecutor(output_bytes=MIB, grace_s=1.0)
        try:
            done = await executor.run(instance.wrap(command, mounts, read_only), ignore)
            assert not instance.setup_failed(done), self.stderr
            return done
        finally:
            await executor.close()

    def run_all(self, *commands: Command) -> list[Completion]:
        """Run commands in one sandbox, one after another."""

        async def main() -> list[Completion]:
            async with self.sandbox.open(
                self.workspace, allowed_urls=self.allowed_urls, mount_at=self.mount_at, hide=self.hide
            ) as instance:
                done = [await self.run(instance, command) for command in commands]
            self.exceeded_limit = instance.exceeded_limit
            return done

        return asyncio.run(asyncio.wait_for(main(), DEADLINE_S))

    def output_of(self, command: Command) -> str:
        """Run one command that must succeed; its output."""
        [done] = self.run_all(command)
        assert (done.exit_code, done.signal) == (0, None), self.stderr
        return self.stdout

    @property
    def stdout(self) -> str:
        """The standard output of the last command."""
        return (self.output / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """The standard error of the last command."""
        return (self.output / "stderr").read_text(errors="replace")


class SandboxContract(ABC):
    """Subclass it as `Test…` and implement `make_sandbox`."""

    @abstractmethod
    def make_sandbox(self, bounds: Bounds = Bounds()) -> Sandbox:  # noqa: B008  frozen
        """A sandbox with these bounds."""

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[SandboxHarness]:
        """A harness with a sandbox without bounds."""
        yield SandboxHarness(tmp_path, self.make_sandbox())
        remove(tmp_path)

    def set_bounds(self, harness: SandboxHarness, bounds: Bounds) -> None:
        """Give the harness a sandbox with these bounds."""
        harness.sandbox = self.make_sandbox(bounds)

    def test_it_is_available(self) -> None:
        """Otherwise `check` raises."""
        self.make_sandbox().check()

    @pytest.mark.parametrize("code", [0, 1, 3, 255])
    def test_exit_codes_are_the_commands_own(self, harness: SandboxHarness, code: int) -> None:
        """The sandbox does not change them."""
        [done] = harness.run_all(harness.command(f"exit {code}"))
        assert (done.exit_code, done.signal, done.timed_out) == (code, None, False)
        assert harness.stdout == harness.stderr == ""

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGINT])
    def test_a_signal_is_not_an_exit_code(self, harness: SandboxHarness, number: int) -> None:
        """It is not reported as 128 plus its number."""
        [done] = harness.run_all(harness.command(f"kill -{int(number)} $$"))
        assert (done.exit_code, done.signal) == (None, number)

    def test_commands_work_in_the_workspace(self, harness: SandboxHarness) -> None:
        """What they write there is readable for us and for the next command."""
        first, second = harness.run_all(harness.command("echo done > result"), harness.command("cat result"))
        assert (first.exit_code, second.exit_code, harness.stdout) == (0, 0, "done\n")
        assert (harness.workspace / "result").read_text() == "done\n"

    def test_the_environment_is_the_commands_own(
        self, harness: SandboxHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Our own environment is not inherited."""
        monkeypatch.setenv("API_TOKEN", "secret")
        command = harness.command('echo "${API_TOKEN-nothing} $KNOB"; env')
        output = harness.output_of(replace(command, environment={**command.environment, "KNOB": "a b"}))
        assert output.startswith("nothing a b\n")
        assert "secret" not in output

    def test_a_timeout_lets_the_command_clean_up_and_ends_all(self, harness: SandboxHarness) -> None:
        """It gets SIGTERM, as without a sandbox."""
        [done] = harness.run_all(harness.command("trap 'echo tidy; exit 7' TERM; sleep 100 & wait", timeout_s=1))
        assert (done.timed_out, done.exit_code, harness.stdout) == (True, 7, "tidy\n")

    def test_a_command_that_ignores_sigterm_is_killed(self, harness: SandboxHarness) -> None:
        """SIGKILL follows after the grace period."""
        [done] = harness.run_all(harness.command("trap '' TERM; while :; do sleep 0.1; done", timeout_s=1))
        assert (done.timed_out, done.signal) == (True, signal.SIGKILL)

    def test_endless_output_is_capped(self, harness: SandboxHarness) -> None:
        """The file stays small, and the command ends at its deadline."""
        [done] = harness.run_all(harness.command("exec yes", timeout_s=0.5))
        assert done.timed_out
        assert len(harness.stdout) < 2 * MIB

    def test_an_allowed_url_responds(self, harness: SandboxHarness) -> None:
        """At the URL that the sandbox returns, with all data in both directions."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write((await reader.read())[::-1])
            await writer.drain()
            writer.close()

        async def main() -> None:
            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with server, harness.sandbox.open(harness.workspace, allowed_urls=(url,)) as instance:
                script = """
                import socket, sys, urllib.parse
                target = urllib.parse.urlsplit(sys.argv[1])
                with socket.create_connection((target.hostname, target.port)) as connection:
                    connection.sendall(b"ab" * 1_000_000)
                    connection.shutdown(socket.SHUT_WR)
                    answer = b"".join(iter(lambda: connection.recv(65536), b""))
                print(answer == b"ba" * 1_000_000)
                """
                await harness.run(instance, harness.python(script, instance.url_inside(f"{url}/v1")))

        asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
        assert harness.stdout == "True\n", harness.stderr
