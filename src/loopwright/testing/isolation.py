"""The contract of a sandbox that isolates untrusted code, as tests that try to escape from it.

class TestMySandbox(IsolationContract):
    def make_sandbox(self, bounds: Bounds = Bounds()) -> Sandbox:
        return MySandbox(bounds)
"""
# ruff: noqa: S101, S104, S108, PTH  These are tests, although they are part of the package.

import asyncio
import ctypes
import os
import platform
import pwd
import signal
import socket
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from loopwright.execution.base import Command
from loopwright.execution.local.processes import all_pids, has_marker
from loopwright.execution.sandbox import Bounds, SandboxError
from loopwright.testing.executors import DEADLINE_S, alive
from loopwright.testing.sandboxes import MIB, SandboxContract, SandboxHarness, run_number


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
        name = f"escaped-{os.getpid()}-{next(run_number)}"
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
        """No port of this machine, no abstract Unix socket, and no interface that leads elsewhere."""
        listeners = [
            socket.create_server(("0.0.0.0", 0)),
            socket.create_server(("::", 0), family=socket.AF_INET6),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
            socket.socket(socket.AF_UNIX),
        ]
        listeners[2].bind(("127.0.0.1", 0))
        listeners[3].bind(f"\0loopwright-{os.getpid()}-{next(run_number)}")
        listeners[3].listen()
        v4, v6, datagrams, abstract = (listener.getsockname() for listener in listeners)
        script = """
        import socket, sys
        v4, v6, datagrams = map(int, sys.argv[1:4])
        for family, address in (
            (socket.AF_INET, ("127.0.0.1", v4)),
            (socket.AF_INET6, ("::1", v6)),
            (socket.AF_UNIX, chr(0) + sys.argv[4]),
        ):
            try:
                socket.socket(family).connect(address)
                print("reached", address)
            except OSError:
                print("no")
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"hello", ("127.0.0.1", datagrams))
        routes = open("/proc/net/route").read().splitlines()[1:]
        try:
            routes += open("/proc/net/ipv6_route").read().splitlines()
        except FileNotFoundError:
            pass
        print([route for route in routes if "lo" not in route.split()])
        """
        try:
            arguments = (str(v4[1]), str(v6[1]), str(datagrams[1]), abstract[1:].decode())
            output = harness.output_of(harness.python(script, *arguments))
            assert output == "no\n" * 3 + "[]\n"
            listeners[2].setblocking(False)
            with pytest.raises(BlockingIOError):
                listeners[2].recv(9)
        finally:
            for listener in listeners:
                listener.close()

    def test_kernel_keys_are_out_of_reach(self, harness: SandboxHarness) -> None:
        """Our key can be neither read nor found, not even by its number, and none is listed."""
        calls = {"x86_64": (248, 250), "aarch64": (217, 219)}.get(platform.machine())
        if calls is None:
            pytest.skip("unknown architecture")
        add_key, keyctl = calls
        libc = ctypes.CDLL(None)
        description = f"loopwright-{os.getpid()}-{next(run_number)}".encode()
        session = -3
        number = libc.syscall(add_key, b"user", description, b"secret", 6, session)
        if number < 0:
            pytest.skip("the kernel has no keys")
        libc.syscall(keyctl, 5, number, 0x3F3F3F3F)  # everybody may do anything with it
        script = """
        import ctypes, sys
        keyctl, number, description = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()
        libc, text = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        print(libc.syscall(keyctl, 11, number, text, 64), text.value)
        print(libc.syscall(keyctl, 10, -3, b"user", description, 0))
        try:
            print(description.decode() in open("/proc/keys").read())
        except OSError:
            print(False)
        """
        try:
            output = harness.output_of(harness.python(script, str(keyctl), str(number), description.decode()))
            assert output == "-1 b''\n-1\nFalse\n"
        finally:
            libc.syscall(keyctl, 3, number)

    def test_a_system_call_filter_is_on(self, harness: SandboxHarness) -> None:
        """Calls that no namespace confines fail, and ordinary programs still run."""
        script = """
        import socket, subprocess, sys, threading
        status = open("/proc/self/status").read()
        print(status.partition("Seccomp:")[2].split()[0])
        try:
            socket.socket(40, socket.SOCK_STREAM)  # AF_VSOCK
            print("open")
        except OSError:
            print("no vsock")
        thread = threading.Thread(target=print, args=("thread",))
        thread.start()
        thread.join()
        subprocess.run([sys.executable, "-IS", "-c", "print('child')"], check=True)
        """
        command = harness.python(script)
        output = harness.output_of(replace(command, argv=(sys.executable, "-ISu", *command.argv[2:])))
        assert output == "2\nno vsock\nthread\nchild\n"

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

    @pytest.mark.parametrize("timeout_s", [1.0, DEADLINE_S], ids=["timeout", "success"])
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

    def test_unlinked_files_do_not_evade_the_disk_bound(self, harness: SandboxHarness) -> None:
        """They take space as long as a process has them open."""
        self.set_bounds(harness, Bounds(disk_bytes=8 * MIB))
        script = """
        import os, time
        files = []
        for number in range(24):
            files.append(open("hidden", "wb"))
            os.unlink("hidden")
            files[-1].write(bytes(1 << 20))
            files[-1].flush()
        time.sleep(50)
        """
        [done] = harness.run_all(harness.python(script))
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
