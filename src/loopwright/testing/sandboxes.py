"""The contract of every sandbox, as tests, and that of an isolating one, which tries to escape from it.

class TestMySandbox(IsolationContract):
    def make_sandbox(self, bounds: Bounds = Bounds()) -> Sandbox:
        return MySandbox(bounds)
"""
# ruff: noqa: S101, S104, S108, PTH  These are tests, although they are part of the package.

import asyncio
import os
import pwd
import signal
import socket
import sys
import tempfile
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from loopwright.execution.base import Command, Completion
from loopwright.execution.local.executor import LocalExecutor
from loopwright.execution.local.processes import all_pids, has_marker
from loopwright.execution.sandbox import Bounds, Sandbox, SandboxError, SandboxInstance
from loopwright.execution.sandbox.base import NO_MOUNTS
from loopwright.execution.sandbox.files import remove
from loopwright.testing.executors import alive, ignore

MIB = 1 << 20
_DEADLINE_S = 60.0
_number = iter(range(1, 1 << 30))


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

    def command(self, script: str, *arguments: str, timeout_s: float = _DEADLINE_S) -> Command:
        """A shell script as a command."""
        return Command(
            argv=("/bin/sh", "-c", script, "script", *arguments),
            directory=self.workspace,
            environment={"PATH": "/usr/bin:/bin"},
            stdout=self.output / "stdout",
            stderr=self.output / "stderr",
            timeout_s=timeout_s,
            marker=f"sandbox-{os.getpid()}-{next(_number)}",
        )

    def python(self, script: str, *arguments: str, timeout_s: float = _DEADLINE_S) -> Command:
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

        return asyncio.run(asyncio.wait_for(main(), _DEADLINE_S))

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

        asyncio.run(asyncio.wait_for(main(), _DEADLINE_S))
        assert harness.stdout == "True\n", harness.stderr


class IsolationContract(SandboxContract):
    """For a sandbox that isolates untrusted code."""

    def test_the_ledger_and_the_home_are_invisible(self, harness: SandboxHarness) -> None:
        """By their paths and through /proc."""
        home = pwd.getpwuid(os.getuid()).pw_dir
        ledger = str(harness.output / "ledger")
        script = (
            'cat "$1" /proc/1/root"$1" /proc/self/root"$1"; ls -A "$2" "$2/.ssh"; cat /etc/shadow /etc/gshadow; true'
        )
        output = harness.output_of(harness.command(script, ledger, home))
        assert "precious" not in output
        assert "root:*" not in output
        assert "root:x" not in output
        # If our interpreter is in the home directory, the directories on its path are visible, and nothing else.
        allowed = {part for prefix in (sys.prefix, sys.base_prefix) for part in Path(prefix).parts}
        names = {line for line in output.splitlines() if line}
        assert not (names & {path.name for path in Path(home).glob("*")}) - allowed
        assert ".ssh" not in names

    def test_nothing_can_be_written_outside(self, harness: SandboxHarness) -> None:
        """Writes elsewhere fail, or are private to the sandbox."""
        name = f"escaped-{os.getpid()}-{next(_number)}"
        targets = [harness.output, *map(Path, ("/usr", "/etc", "/tmp", "/var/tmp", "/run", "/dev", "/"))]
        script = 'for target; do mkdir -p "$target"; echo out > "$target/$NAME"; done; exit 0'
        command = harness.command(script, *map(str, targets))
        harness.output_of(replace(command, environment={**command.environment, "NAME": name}))
        assert [target for target in targets if (target / name).exists()] == []
        assert (harness.output / "ledger").read_text() == "precious"

    def test_processes_outside_are_invisible(self, harness: SandboxHarness) -> None:
        """They are not listed and cannot be signalled; killing all processes kills those of the sandbox."""
        script = """
        import os, signal, sys
        ours = int(sys.argv[1])
        print([pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) > 50])
        for number in (0, signal.SIGTERM):
            try:
                os.kill(ours, number)
                print("signalled")
            except ProcessLookupError:
                print("nobody")
        os.kill(-1, signal.SIGKILL)
        """
        bystander = os.getppid()
        harness.run_all(harness.python(script, str(os.getpid())))
        assert harness.stdout.splitlines() == ["[]", "nobody", "nobody"]
        assert alive(bystander)

    def test_no_other_address_is_reachable(self, harness: SandboxHarness) -> None:
        """Neither another port of this machine, nor the internet, nor an abstract Unix socket."""
        with socket.socket() as port, socket.socket(socket.AF_UNIX) as abstract:
            port.bind(("0.0.0.0", 0))
            port.listen()
            name = f"\0loopwright-{os.getpid()}"
            abstract.bind(name)
            abstract.listen()
            script = """
            import socket, sys
            number, name = int(sys.argv[1]), sys.argv[2]
            for family, kind, address in (
                (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", number)),
                (socket.AF_INET, socket.SOCK_STREAM, ("1.1.1.1", 443)),
                (socket.AF_INET, socket.SOCK_DGRAM, ("1.1.1.1", 53)),
                (socket.AF_INET6, socket.SOCK_STREAM, ("2606:4700:4700::1111", 443)),
                (socket.AF_UNIX, socket.SOCK_STREAM, chr(0) + name),
            ):
                with socket.socket(family, kind) as caller:
                    caller.settimeout(5)
                    try:
                        caller.connect(address)
                        print("reached", address)
                    except OSError as error:
                        print("no")
            """
            output = harness.output_of(harness.python(script, str(port.getsockname()[1]), name[1:]))
        assert output == "no\n" * 5

    def test_no_privileges_can_be_gained(self, harness: SandboxHarness) -> None:
        """No mounts, namespaces, devices, setuid programs or kernel settings."""
        script = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.umount2(b"/proc", 2), libc.chroot(b"/tmp"))
        print([libc.unshare(flag) for flag in (0x10000000, 0x00020000, 0x40000000, 0x20000000)])
        try:
            os.mknod("disk", 0o60666, os.makedev(8, 0))
        except OSError:
            print("no device")
        status = open("/proc/self/status").read()
        print([line.split()[1].strip("0") for line in status.splitlines() if line.startswith("Cap")])
        print("NoNewPrivs:\\t1" in status)
        for name in ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/swappiness", "/proc/sysrq-trigger"):
            try:
                open(name, "r+")
            except OSError:
                print("no")
        """
        command = replace(harness.python(script), argv=(sys.executable, "-I", "-c", textwrap.dedent(script)))
        output = harness.output_of(command).splitlines()
        assert output == ["-1 -1 -1", "[-1, -1, -1, -1]", "no device", str([""] * 5), "True", *["no"] * 3]

    def test_the_commands_environment_is_for_the_inside_only(self, harness: SandboxHarness) -> None:
        """Otherwise a task could make our tools load its code; and secrets are not on a command line."""

        async def main() -> Command:
            async with harness.sandbox.open(harness.workspace) as instance:
                command = harness.command("true")
                environment = {**command.environment, "LD_PRELOAD": "/workspace/evil.so", "SESSION_KEY": "sk-123"}
                return instance.wrap(replace(command, environment=environment))

        command = asyncio.run(main())
        assert "LD_PRELOAD" not in command.environment
        assert not [word for word in command.argv if "sk-123" in word]

    @pytest.mark.parametrize("timeout_s", [1.0, _DEADLINE_S], ids=["timeout", "success"])
    def test_daemons_end_with_their_command(self, harness: SandboxHarness, timeout_s: float) -> None:
        """Forked twice, in a new session, with an empty environment: gone when the run returns."""
        wait = "sleep 100" if timeout_s < 2 else "while [ ! -e beat ]; do sleep 0.01; done"
        daemon = "while :; do touch beat; sleep 0.02; done"
        script = f"(env -i setsid sh -c 'sh -c \"{daemon}\" & ' >/dev/null 2>&1 &); {wait}"
        command = harness.command(script, timeout_s=timeout_s)
        harness.run_all(command)
        (harness.workspace / "beat").unlink()
        assert not [pid for pid in all_pids() if has_marker(pid, command.marker)]
        asyncio.run(asyncio.sleep(0.1))
        assert not (harness.workspace / "beat").exists()

    def test_a_fork_bomb_is_contained(self, harness: SandboxHarness) -> None:
        """It is stopped by the bound on processes, long before its deadline.

        It grows linearly, not exponentially: where only the monitor enforces the bound, other tests run here too.
        """
        self.set_bounds(harness, Bounds(processes=40))
        [done] = harness.run_all(harness.command("while :; do sleep 50 & done"))
        assert not done.timed_out
        assert (harness.exceeded_limit or "").startswith("processes") or "fork" in harness.stderr.lower()

    def test_memory_is_bounded_per_process(self, harness: SandboxHarness) -> None:
        """The kernel refuses more."""
        self.set_bounds(harness, Bounds(memory_bytes=200 * MIB))
        harness.run_all(harness.python("x = bytearray(400 << 20); print(len(x))"))
        assert harness.stdout == ""
        assert "MemoryError" in harness.stderr or (harness.exceeded_limit or "").startswith("memory")

    def test_memory_is_bounded_in_total(self, harness: SandboxHarness) -> None:
        """Each process alone is below the bound."""
        self.set_bounds(harness, Bounds(memory_bytes=200 * MIB))
        [done] = harness.run_all(
            harness.python("import os, time; os.fork(); os.fork(); x = b'x' * (80 << 20); time.sleep(50)")
        )
        assert (done.signal, (harness.exceeded_limit or "")[:7]) == (signal.SIGKILL, "memory:")

    def test_cpu_time_is_bounded_in_total(self, harness: SandboxHarness) -> None:
        """Each process alone is below the bound."""
        self.set_bounds(harness, Bounds(cpu_s=1))
        [done] = harness.run_all(harness.python("import os; os.fork(); os.fork()\nwhile True: pass"))
        assert done.signal is not None
        assert not done.timed_out

    def test_disk_usage_is_bounded(self, harness: SandboxHarness) -> None:
        """In the workspace, in the home, and in every other writable directory; in one file and in many."""
        self.set_bounds(harness, Bounds(disk_bytes=8 * MIB))
        for target in (".", "$HOME", "/tmp", "/dev/shm"):
            script = f"i=0; while :; do i=$((i+1)); head -c 1000000 /dev/zero > {target}/fill-$i || exit; done"
            [done] = harness.run_all(harness.command(script))
            assert (done.signal, (harness.exceeded_limit or "")[:5]) == (signal.SIGKILL, "disk:"), target
            for file in harness.workspace.glob("fill-*"):
                file.unlink()
        harness.run_all(harness.command("head -c 100000000 /dev/zero > one"))
        assert (harness.workspace / "one").stat().st_size <= 8 * MIB

    def test_an_unreadable_directory_does_not_evade_the_disk_bound(self, harness: SandboxHarness) -> None:
        """Root can read it; for other users it counts as too large."""
        self.set_bounds(harness, Bounds(disk_bytes=8 * MIB))
        fill = "mkdir trap; chmod 0300 trap; i=0; while :; do i=$((i+1)); head -c 1000000 /dev/zero > trap/$i; done"
        [done] = harness.run_all(harness.command(fill))
        assert (done.signal, (harness.exceeded_limit or "")[:5]) == (signal.SIGKILL, "disk:")

    def test_instances_are_separate(self, harness: SandboxHarness) -> None:
        """Files outside the workspace are shared by commands of one instance only."""
        leave = harness.command("echo hi > /tmp/note; echo hi > ~/note; echo hi > /dev/shm/note")
        harness.run_all(leave, harness.command("cat /tmp/note ~/note /dev/shm/note"))
        assert harness.stdout == "hi\n" * 3
        harness.run_all(harness.command("ls /tmp/note ~/note /dev/shm/note"))
        assert harness.stdout == ""

    def test_nothing_is_left_of_an_instance(self, harness: SandboxHarness, monkeypatch: pytest.MonkeyPatch) -> None:
        """Even if its files have no permissions."""
        scratch = harness.root / "scratch"
        scratch.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(scratch))
        harness.run_all(harness.command("mkdir -p /tmp/a/b ~/c && touch /tmp/a/b/d && chmod 000 /tmp/a/b /tmp/a ~/c"))
        assert list(scratch.iterdir()) == []

    def test_the_workspace_is_mounted_at_its_path(self, harness: SandboxHarness) -> None:
        """A task may expect it at /app."""
        harness.mount_at = "/app"
        (harness.workspace / "sub").mkdir()
        command = replace(harness.command("pwd; echo here > ../file"), directory=harness.workspace / "sub")
        assert harness.output_of(command) == "/app/sub\n"
        assert (harness.workspace / "file").read_text() == "here\n"

    def test_mounts_are_for_one_command(self, harness: SandboxHarness) -> None:
        """The agent does not see the tests; the tests can write their verdict, but not change themselves."""
        tests, logs = harness.root / "tests", harness.root / "logs"
        tests.mkdir()
        logs.mkdir()
        (tests / "answer").write_text("42\n")

        async def main() -> None:
            async with harness.sandbox.open(harness.workspace) as instance:
                await harness.run(instance, harness.command("cat /tests/answer"))
                assert harness.stdout == ""
                verdict = harness.command("echo 7 >> /tests/answer; cat /tests/answer > /logs/verifier/reward.txt")
                await harness.run(instance, verdict, {"/logs/verifier": logs}, {"/tests": tests})

        asyncio.run(main())
        assert (logs / "reward.txt").read_text() == "42\n"

    def test_hidden_directories_are_empty(self, harness: SandboxHarness) -> None:
        """Also below a visible directory."""
        visible = Path(os.__file__).parent / "json"
        for hidden in (visible, Path("/usr/share/doc"), harness.output):
            harness.hide = (hidden,)
            assert harness.output_of(harness.command('ls "$1/"; exit 0', str(hidden))) == "", hidden
        harness.hide = ()
        assert "decoder.py" in harness.output_of(harness.command('ls "$1/"', str(visible)))

    def test_links_do_not_redirect_later_mounts(self, harness: SandboxHarness) -> None:
        """A mount appears at its own path, even if the agent put a link there."""
        victim = harness.root / "victim"
        victim.mkdir()
        target = f"../../../../../../../oldroot{victim}"

        async def main() -> None:
            async with harness.sandbox.open(harness.workspace) as instance:
                await harness.run(instance, harness.command('ln -s "$1" /tmp/link; ln -s "$1" ~/link', target))
                mounts = {"/tmp/link/in": harness.output, f"{pwd.getpwuid(os.getuid()).pw_dir}/link/in": harness.output}
                await harness.run(instance, harness.command("cat /tmp/link/in/ledger"), mounts)
                assert harness.stdout == "precious"

        asyncio.run(main())
        assert list(victim.iterdir()) == []

    def test_permissions_do_not_block_later_mounts(self, harness: SandboxHarness) -> None:
        """An agent that removes all permissions does not keep the tests from running."""

        async def main() -> None:
            async with harness.sandbox.open(harness.workspace) as instance:
                await harness.run(instance, harness.command("mkdir -p /tmp/logs && chmod 000 /tmp/logs /tmp"))
                await harness.run(
                    instance, harness.command("cat /tmp/logs/in/ledger"), {"/tmp/logs/in": harness.output}
                )
                assert harness.stdout == "precious"

        asyncio.run(main())

    def test_a_link_in_a_system_directory_does_not_redirect_a_mount(self, harness: SandboxHarness) -> None:
        """Where commands can write to /usr."""
        if not os.access("/usr", os.W_OK):
            harness.mount_at = "/usr/src/app-of-loopwright"
            with pytest.raises(SandboxError, match="read-only"):
                harness.run_all(harness.command("true"))
            return
        victim = harness.root / "victim"
        victim.mkdir()
        relink = 'cd /; rm -rf /usr/new; mkdir -p /usr/other; ln -s "$1" /usr/new; exit 0'

        async def main() -> None:
            async with harness.sandbox.open(harness.workspace) as instance:
                await harness.run(instance, harness.command(relink, f"../../../oldroot{victim}"))
                with pytest.raises(SandboxError, match="by a link"):
                    instance.wrap(harness.command("true"), {"/usr/new/logs": harness.output})

        asyncio.run(main())
        assert list(victim.iterdir()) == []
