"""What every sandbox promises, as tests, and what one with walls promises besides: escapes are tried.

class TestMine(WallsContract):
    def make_sandbox(self, bounds: Bounds = Bounds()) -> Sandbox:
        return Mine(bounds)
"""
# ruff: noqa: S101, S104, S108, PTH  These are tests, wherever they stand.

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
from loopwright.execution.local.processes import all_pids, marked
from loopwright.execution.sandbox import Bounds, Room, Sandbox, SandboxError
from loopwright.execution.sandbox.base import NO_MOUNTS
from loopwright.execution.sandbox.files import remove
from loopwright.testing.executors import alive, ignore

MIB = 1 << 20
_DEADLINE_S = 60.0
_number = iter(range(1, 1 << 30))


class Place:
    """A workspace and what lies beside it, and a way to run scripts in a room over it."""

    def __init__(self, root: Path, sandbox: Sandbox) -> None:
        self.root, self.sandbox = root, sandbox
        self.workspace, self.output = root / "workspace", root / "output"
        self.workspace.mkdir()
        self.output.mkdir()
        (self.output / "ledger").write_text("precious")
        self.reach: tuple[str, ...] = ()
        self.at: str | None = None
        self.hide: tuple[Path, ...] = ()
        self.exceeded: str | None = None

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
        """A Python script as a command, by our own interpreter, which rooms show."""
        argv = (sys.executable, "-IS", "-c", textwrap.dedent(script), *arguments)
        return replace(self.command("", timeout_s=timeout_s), argv=argv)

    async def run(
        self,
        room: Room,
        command: Command,
        mounts: Mapping[str, Path] = NO_MOUNTS,
        fixed: Mapping[str, Path] = NO_MOUNTS,
    ) -> Completion:
        """Run one command in a room that is open."""
        executor = LocalExecutor(output_bytes=MIB, grace_s=2.0)
        try:
            done = await executor.run(room.command(command, mounts, fixed), ignore)
            assert not room.failed(done), self.stderr
            return done
        finally:
            await executor.close()

    def runs(self, *commands: Command) -> list[Completion]:
        """Run commands in one room, one after another."""

        async def main() -> list[Completion]:
            async with self.sandbox.room(self.workspace, reach=self.reach, at=self.at, hide=self.hide) as room:
                done = [await self.run(room, command) for command in commands]
            self.exceeded = room.exceeded
            return done

        return asyncio.run(asyncio.wait_for(main(), _DEADLINE_S))

    def says(self, command: Command) -> str:
        """Run one command to a good end; what it printed."""
        [done] = self.runs(command)
        assert (done.exit_code, done.signal) == (0, None), self.stderr
        return self.stdout

    @property
    def stdout(self) -> str:
        """What the last command printed."""
        return (self.output / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What the last command complained about."""
        return (self.output / "stderr").read_text(errors="replace")


class SandboxContract(ABC):
    """Subclass it, name the subclass `Test…`, and give it a sandbox."""

    @abstractmethod
    def make_sandbox(self, bounds: Bounds = Bounds()) -> Sandbox:  # noqa: B008  frozen
        """A sandbox with these bounds."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[Place]:
        """A workspace, and a sandbox without bounds."""
        yield Place(tmp_path, self.make_sandbox())
        remove(tmp_path)

    def bounded(self, place: Place, bounds: Bounds) -> None:
        """Let the place's rooms have these bounds."""
        place.sandbox = self.make_sandbox(bounds)

    def test_it_can_be_had_here(self) -> None:
        """Otherwise it would say why."""
        self.make_sandbox().check()

    @pytest.mark.parametrize("code", [0, 1, 3, 255])
    def test_exit_codes_are_the_commands_own(self, place: Place, code: int) -> None:
        """Nothing in between adds to them."""
        [done] = place.runs(place.command(f"exit {code}"))
        assert (done.exit_code, done.signal, done.timed_out) == (code, None, False)
        assert place.stdout == place.stderr == ""

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGINT])
    def test_an_end_by_signal_is_reported_as_one(self, place: Place, number: int) -> None:
        """It is no exit code of 128 and something."""
        [done] = place.runs(place.command(f"kill -{int(number)} $$"))
        assert (done.exit_code, done.signal) == (None, number)

    def test_it_works_in_the_workspace(self, place: Place) -> None:
        """What it writes there is ours to read, and there for the next command."""
        first, second = place.runs(place.command("echo done > result"), place.command("cat result"))
        assert (first.exit_code, second.exit_code, place.stdout) == (0, 0, "done\n")
        assert (place.workspace / "result").read_text() == "done\n"

    def test_the_environment_is_what_was_given(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing of our own is inherited."""
        monkeypatch.setenv("API_TOKEN", "secret")
        command = place.command('echo "${API_TOKEN-nothing} $KNOB"; env')
        said = place.says(replace(command, environment={**command.environment, "KNOB": "a b"}))
        assert said.startswith("nothing a b\n")
        assert "secret" not in said

    def test_a_timeout_lets_the_command_clean_up_and_ends_all(self, place: Place) -> None:
        """SIGTERM reaches it, as it would without a sandbox."""
        [done] = place.runs(place.command("trap 'echo tidy; exit 7' TERM; sleep 100 & wait", timeout_s=1))
        assert (done.timed_out, done.exit_code, place.stdout) == (True, 7, "tidy\n")

    def test_ignoring_sigterm_does_not_help(self, place: Place) -> None:
        """SIGKILL follows."""
        [done] = place.runs(place.command("trap '' TERM; while :; do sleep 0.1; done", timeout_s=1))
        assert (done.timed_out, done.signal) == (True, signal.SIGKILL)

    def test_endless_output_is_cut(self, place: Place) -> None:
        """The file stays small, and the command ends at its deadline."""
        [done] = place.runs(place.command("exec yes", timeout_s=0.5))
        assert done.timed_out
        assert len(place.stdout) < 2 * MIB

    def test_a_url_that_may_be_reached_answers(self, place: Place) -> None:
        """By the name that the room gives it, and with all that is sent, both ways."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write((await reader.read())[::-1])
            await writer.drain()
            writer.close()

        async def main() -> None:
            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with server, place.sandbox.room(place.workspace, reach=(url,)) as room:
                script = """
                import socket, sys, urllib.parse
                place = urllib.parse.urlsplit(sys.argv[1])
                with socket.create_connection((place.hostname, place.port)) as door:
                    door.sendall(b"ab" * 1_000_000)
                    door.shutdown(socket.SHUT_WR)
                    answer = b"".join(iter(lambda: door.recv(65536), b""))
                print(answer == b"ba" * 1_000_000)
                """
                await place.run(room, place.python(script, room.reachable(f"{url}/v1")))

        asyncio.run(asyncio.wait_for(main(), _DEADLINE_S))
        assert place.stdout == "True\n", place.stderr


class WallsContract(SandboxContract):
    """For a sandbox that keeps strangers in."""

    def test_the_ledger_and_the_home_cannot_be_seen(self, place: Place) -> None:
        """Neither by their paths nor through the processes' own roots."""
        home = pwd.getpwuid(os.getuid()).pw_dir
        ledger = str(place.output / "ledger")
        script = (
            'cat "$1" /proc/1/root"$1" /proc/self/root"$1"; ls -A "$2" "$2/.ssh"; cat /etc/shadow /etc/gshadow; true'
        )
        said = place.says(place.command(script, ledger, home))
        assert "precious" not in said
        assert "root:*" not in said
        assert "root:x" not in said
        # Where our own interpreter lives in the home, the way to it is there, and nothing beside it.
        way = {part for prefix in (sys.prefix, sys.base_prefix) for part in Path(prefix).parts}
        seen = {line for line in said.splitlines() if line}
        assert not (seen & {path.name for path in Path(home).glob("*")}) - way
        assert ".ssh" not in seen

    def test_nothing_can_be_written_outside(self, place: Place) -> None:
        """Its writes elsewhere fail, or go where nobody else sees them."""
        name = f"escaped-{os.getpid()}-{next(_number)}"
        targets = [place.output, *map(Path, ("/usr", "/etc", "/tmp", "/var/tmp", "/run", "/dev", "/"))]
        script = 'for place; do mkdir -p "$place"; echo out > "$place/$NAME"; done; exit 0'
        command = place.command(script, *map(str, targets))
        place.says(replace(command, environment={**command.environment, "NAME": name}))
        assert [target for target in targets if (target / name).exists()] == []
        assert (place.output / "ledger").read_text() == "precious"

    def test_processes_outside_can_neither_be_seen_nor_signalled(self, place: Place) -> None:
        """Ours is not even listed; killing all processes kills those of the room."""
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
        place.runs(place.python(script, str(os.getpid())))
        assert place.stdout.splitlines() == ["[]", "nobody", "nobody"]
        assert alive(bystander)

    def test_no_other_address_can_be_reached(self, place: Place) -> None:
        """Neither another port of this machine, nor the internet, nor a socket without a file."""
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
            said = place.says(place.python(script, str(port.getsockname()[1]), name[1:]))
        assert said == "no\n" * 5

    def test_no_powers_can_be_had(self, place: Place) -> None:
        """No mounts, no namespaces, no devices, no programs that run as somebody else, no settings of the kernel."""
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
        command = replace(place.python(script), argv=(sys.executable, "-I", "-c", textwrap.dedent(script)))
        said = place.says(command).splitlines()
        assert said == ["-1 -1 -1", "[-1, -1, -1, -1]", "no device", str([""] * 5), "True", *["no"] * 3]

    def test_the_given_environment_is_for_the_inside_alone(self, place: Place) -> None:
        """Else a task could make our own tools load its code; nor do secrets stand on a command line."""

        async def main() -> Command:
            async with place.sandbox.room(place.workspace) as room:
                command = place.command("true")
                given = {**command.environment, "LD_PRELOAD": "/workspace/evil.so", "SESSION_KEY": "sk-123"}
                return room.command(replace(command, environment=given))

        command = asyncio.run(main())
        assert "LD_PRELOAD" not in command.environment
        assert not [word for word in command.argv if "sk-123" in word]

    @pytest.mark.parametrize("timeout_s", [1.0, _DEADLINE_S], ids=["timeout", "good end"])
    def test_daemons_end_with_their_command(self, place: Place, timeout_s: float) -> None:
        """Forked twice, in a session of its own, without anything of its environment: gone when the run returns."""
        wait = "sleep 100" if timeout_s < 2 else "while [ ! -e beat ]; do sleep 0.01; done"
        daemon = "while :; do touch beat; sleep 0.02; done"
        script = f"(env -i setsid sh -c 'sh -c \"{daemon}\" & ' >/dev/null 2>&1 &); {wait}"
        command = place.command(script, timeout_s=timeout_s)
        place.runs(command)
        (place.workspace / "beat").unlink()
        assert not [pid for pid in all_pids() if marked(pid, command.marker)]
        asyncio.run(asyncio.sleep(0.1))
        assert not (place.workspace / "beat").exists()

    def test_a_fork_bomb_goes_off_inside(self, place: Place) -> None:
        """It runs into its bound, or is ended for it; either way it is over long before its deadline.

        It grows evenly, not by doubling: where nothing but a look at the processes bounds them, others work here too.
        """
        self.bounded(place, Bounds(processes=40))
        [done] = place.runs(place.command("while :; do sleep 50 & done"))
        assert not done.timed_out
        assert (place.exceeded or "").startswith("processes") or "fork" in place.stderr.lower()

    def test_memory_is_bounded_for_one_process(self, place: Place) -> None:
        """It is not given more."""
        self.bounded(place, Bounds(memory_bytes=200 * MIB))
        place.runs(place.python("x = bytearray(400 << 20); print(len(x))"))
        assert place.stdout == ""
        assert "MemoryError" in place.stderr or (place.exceeded or "").startswith("memory")

    def test_memory_is_bounded_for_all_together(self, place: Place) -> None:
        """Each by itself would be small enough."""
        self.bounded(place, Bounds(memory_bytes=200 * MIB))
        [done] = place.runs(
            place.python("import os, time; os.fork(); os.fork(); x = b'x' * (80 << 20); time.sleep(50)")
        )
        assert (done.signal, (place.exceeded or "")[:7]) == (signal.SIGKILL, "memory:")

    def test_cpu_time_is_bounded_for_all_together(self, place: Place) -> None:
        """Each by itself would be short enough."""
        self.bounded(place, Bounds(cpu_s=1))
        [done] = place.runs(place.python("import os; os.fork(); os.fork()\nwhile True: pass"))
        assert done.signal is not None
        assert not done.timed_out

    def test_the_disk_is_bounded(self, place: Place) -> None:
        """In the workspace, in its home, and wherever else it may write; in one file and in many."""
        self.bounded(place, Bounds(disk_bytes=8 * MIB))
        for target in (".", "$HOME", "/tmp", "/dev/shm"):
            script = f"i=0; while :; do i=$((i+1)); head -c 1000000 /dev/zero > {target}/fill-$i || exit; done"
            [done] = place.runs(place.command(script))
            assert (done.signal, (place.exceeded or "")[:5]) == (signal.SIGKILL, "disk:"), target
            for file in place.workspace.glob("fill-*"):
                file.unlink()
        place.runs(place.command("head -c 100000000 /dev/zero > one"))
        assert (place.workspace / "one").stat().st_size <= 8 * MIB

    def test_a_directory_that_hides_its_size_is_no_way_around(self, place: Place) -> None:
        """Root can look into it; others take it for too much."""
        self.bounded(place, Bounds(disk_bytes=8 * MIB))
        fill = "mkdir trap; chmod 0300 trap; i=0; while :; do i=$((i+1)); head -c 1000000 /dev/zero > trap/$i; done"
        [done] = place.runs(place.command(fill))
        assert (done.signal, (place.exceeded or "")[:5]) == (signal.SIGKILL, "disk:")

    def test_rooms_do_not_meet(self, place: Place) -> None:
        """What one leaves outside its workspace the next does not find; two commands of one room do."""
        leave = place.command("echo hi > /tmp/note; echo hi > ~/note; echo hi > /dev/shm/note")
        place.runs(leave, place.command("cat /tmp/note ~/note /dev/shm/note"))
        assert place.stdout == "hi\n" * 3
        place.runs(place.command("ls /tmp/note ~/note /dev/shm/note"))
        assert place.stdout == ""

    def test_nothing_is_left_of_a_room(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also if it forbids everybody to look into what it left."""
        scratch = place.root / "scratch"
        scratch.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(scratch))
        place.runs(place.command("mkdir -p /tmp/a/b ~/c && touch /tmp/a/b/d && chmod 000 /tmp/a/b /tmp/a ~/c"))
        assert list(scratch.iterdir()) == []

    def test_the_workspace_goes_by_the_name_it_is_given(self, place: Place) -> None:
        """A task that speaks of /app finds it."""
        place.at = "/app"
        (place.workspace / "sub").mkdir()
        command = replace(place.command("pwd; echo here > ../file"), directory=place.workspace / "sub")
        assert place.says(command) == "/app/sub\n"
        assert (place.workspace / "file").read_text() == "here\n"

    def test_mounts_are_for_one_command(self, place: Place) -> None:
        """The agent does not see the tests, and the tests can write their verdict, but not to themselves."""
        tests, logs = place.root / "tests", place.root / "logs"
        tests.mkdir()
        logs.mkdir()
        (tests / "answer").write_text("42\n")

        async def main() -> None:
            async with place.sandbox.room(place.workspace) as room:
                await place.run(room, place.command("cat /tests/answer"))
                assert place.stdout == ""
                verdict = place.command("echo 7 >> /tests/answer; cat /tests/answer > /logs/verifier/reward.txt")
                await place.run(room, verdict, {"/logs/verifier": logs}, {"/tests": tests})

        asyncio.run(main())
        assert (logs / "reward.txt").read_text() == "42\n"

    def test_what_is_hidden_is_empty(self, place: Place) -> None:
        """Also where the place around it can be seen."""
        seen = Path(os.__file__).parent / "json"
        for hidden in (seen, Path("/usr/share/doc"), place.output):
            place.hide = (hidden,)
            assert place.says(place.command('ls "$1/"; exit 0', str(hidden))) == "", hidden
        place.hide = ()
        assert "decoder.py" in place.says(place.command('ls "$1/"', str(seen)))

    def test_links_left_behind_do_not_lead_the_next_command_out(self, place: Place) -> None:
        """A mount goes to its place, even if the agent put a link there that leads elsewhere."""
        victim = place.root / "victim"
        victim.mkdir()
        target = f"../../../../../../../oldroot{victim}"

        async def main() -> None:
            async with place.sandbox.room(place.workspace) as room:
                await place.run(room, place.command('ln -s "$1" /tmp/door; ln -s "$1" ~/door', target))
                mounts = {"/tmp/door/in": place.output, f"{pwd.getpwuid(os.getuid()).pw_dir}/door/in": place.output}
                await place.run(room, place.command("cat /tmp/door/in/ledger"), mounts)
                assert place.stdout == "precious"

        asyncio.run(main())
        assert list(victim.iterdir()) == []

    def test_a_way_that_was_closed_is_opened_for_the_next_command(self, place: Place) -> None:
        """An agent that forbids everybody its own directories does not keep the tests out."""

        async def main() -> None:
            async with place.sandbox.room(place.workspace) as room:
                await place.run(room, place.command("mkdir -p /tmp/logs && chmod 000 /tmp/logs /tmp"))
                await place.run(room, place.command("cat /tmp/logs/in/ledger"), {"/tmp/logs/in": place.output})
                assert place.stdout == "precious"

        asyncio.run(main())

    def test_a_link_over_a_system_directory_does_not_lead_out_either(self, place: Place) -> None:
        """Where the room may change its system, and the workspace is in it."""
        if not os.access("/usr", os.W_OK):
            place.at = "/usr/src/app-of-loopwright"
            with pytest.raises(SandboxError, match="read-only"):
                place.runs(place.command("true"))
            return
        victim = place.root / "victim"
        victim.mkdir()
        lead = 'cd /; rm -rf /usr/new; mkdir -p /usr/other; ln -s "$1" /usr/new; exit 0'

        async def main() -> None:
            async with place.sandbox.room(place.workspace) as room:
                await place.run(room, place.command(lead, f"../../../oldroot{victim}"))
                with pytest.raises(SandboxError, match="link in the way"):
                    room.command(place.command("true"), {"/usr/new/logs": place.output})

        asyncio.run(main())
        assert list(victim.iterdir()) == []
