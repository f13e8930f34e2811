"""Sandboxes keep their promises, escapes are tried, and what strangers left is read and removed with care."""

import asyncio
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fake_docker import FakeDocker

from loopwright.execution.local.processes import start_ticks
from loopwright.execution.sandbox import Bounds, SandboxError, cgroup, sandbox_of
from loopwright.execution.sandbox.bubblewrap import remove_stale
from loopwright.execution.sandbox.cgroup import Cgroup
from loopwright.execution.sandbox.docker import _machine, remove_stale_containers
from loopwright.execution.sandbox.files import read_inside, remove, size_bytes
from loopwright.execution.sandbox.network_proxy import NetworkProxy
from loopwright.testing import IsolationContract, SandboxContract
from loopwright.testing.sandboxes import SandboxHarness

NO_BOUNDS = Bounds()


def tool(path, script):
    """A program that is this shell script."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


class TestNone(SandboxContract):
    def make_sandbox(self, bounds=NO_BOUNDS):
        return sandbox_of("none", bounds)


class TestBubblewrap(IsolationContract):
    def make_sandbox(self, bounds=NO_BOUNDS):
        return sandbox_of("bwrap", bounds)


class TestWhatStrangersLeave:
    def test_a_plain_file_is_read_up_to_its_limit(self, tmp_path):
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs/reward.txt").write_text("0.75")
        assert read_inside(tmp_path, "logs/reward.txt", 100) == b"0.75"
        assert read_inside(tmp_path, "logs/reward.txt", 3) == b"0.7"

    @pytest.mark.parametrize(
        "name", ["link", "folder/secret", "pipe", "logs", "missing", "../secret", "/etc/passwd", ""]
    )
    def test_nothing_leads_out(self, tmp_path, name):
        """Given links out of the workspace, a pipe that nobody writes to, and odd names, then there is no such file."""
        inside = tmp_path / "workspace"
        inside.mkdir()
        (tmp_path / "secret").write_text("key")
        (inside / "link").symlink_to(tmp_path / "secret")
        (inside / "folder").symlink_to(tmp_path)
        (inside / "logs").mkdir()
        os.mkfifo(inside / "pipe")
        with pytest.raises(FileNotFoundError):
            read_inside(inside, name, 100)

    def test_a_device_is_no_plain_file(self):
        with pytest.raises(FileNotFoundError, match="not a regular file"):
            read_inside(Path("/dev"), "zero", 100)

    def test_what_forbids_to_be_opened_is_removed(self, tmp_path):
        root = tmp_path / "room"
        (root / "a/b").mkdir(parents=True)
        (root / "a/b/file").touch()
        (root / "a/b").chmod(0)
        (root / "a").chmod(0o500)
        remove(root)
        assert not root.exists()

    def test_what_lies_thousands_deep_is_measured_and_removed(self, tmp_path):
        root = tmp_path / "room"
        root.mkdir()
        directory = os.open(root, os.O_RDONLY)
        for _ in range(3000):
            os.mkdir("d", dir_fd=directory)
            inner = os.open("d", os.O_RDONLY, dir_fd=directory)
            os.close(directory)
            directory = inner
        os.close(directory)
        assert size_bytes(root) is not None
        remove(root)
        assert not root.exists()

    def test_links_are_removed_and_what_they_point_to_is_not(self, tmp_path):
        root = tmp_path / "room"
        root.mkdir()
        (tmp_path / "kept").mkdir()
        (root / "link").symlink_to(tmp_path / "kept")
        remove(root)
        assert (tmp_path / "kept").exists()


class TestDoors:
    def test_names_and_loopback_stay_and_other_addresses_become_loopback(self):
        """Given several places, each has an address of its own inside; a name stays, so that certificates fit."""
        reach = ("https://models.example/v1", "http://10.0.0.5:8400", "http://10.0.0.6:8400", "http://localhost:9/x")
        gate = NetworkProxy(reach)
        assert gate.url_inside("https://models.example/v1/chat") == "https://models.example/v1/chat"
        assert gate.url_inside("http://10.0.0.5:8400/a?b=c") == "http://127.77.0.2:8400/a?b=c"
        assert gate.url_inside("http://10.0.0.6:8400") == "http://127.77.0.3:8400"
        assert gate.url_inside("http://localhost:9/y") == "http://localhost:9/y"
        assert gate.hosts() == "127.0.0.1\tlocalhost\n127.77.0.1\tmodels.example\n"

    def test_what_was_not_named_has_no_door(self):
        with pytest.raises(SandboxError, match="allowed_urls"):
            NetworkProxy(("http://127.0.0.1:8400",)).url_inside("http://127.0.0.1:8401")

    @pytest.mark.parametrize("url", ["127.0.0.1:8400", "http://", "file:///etc", "http://a:port"])
    def test_what_is_no_place_is_refused(self, url):
        with pytest.raises(SandboxError, match="http://host:port"):
            NetworkProxy((url,))


class TestNotToBeHad:
    def test_an_unknown_name(self):
        with pytest.raises(SandboxError, match="Known: none, bwrap, docker"):
            sandbox_of("chroot")

    def test_without_bubblewrap_it_says_what_to_install(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
            sandbox_of("bwrap").check()

    @pytest.mark.parametrize(
        ("said", "advice"),
        [
            ("bwrap: No permissions to create new namespace", "user.max_user_namespaces"),
            ("bwrap: Unknown option --disable-userns", "0.8 or newer"),
        ],
    )
    def test_without_user_namespaces_it_says_so(self, tmp_path, monkeypatch, said, advice):
        tool(tmp_path / "bwrap", f"echo '{said}' >&2; exit 1")
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with pytest.raises(SandboxError, match=said) as caught:
            sandbox_of("bwrap").check()
        assert advice in str(caught.value)

    def test_what_is_to_be_readable_must_exist(self, tmp_path):
        with pytest.raises(SandboxError, match="no-such-directory"):
            sandbox_of("bwrap", readable=(tmp_path / "no-such-directory",)).check()

    def test_without_a_daemon_docker_says_so(self, tmp_path, monkeypatch):
        tool(tmp_path / "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with pytest.raises(SandboxError, match=r"Cannot connect to the Docker daemon.*systemctl start docker"):
            sandbox_of("docker").check()

    def test_without_docker_it_says_so(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(SandboxError, match="needs Docker"):
            sandbox_of("docker").check()


class TestReadable:
    def test_what_is_named_can_be_read_and_not_written(self, tmp_path):
        """Given an agent that lives in a directory of its own, then its rooms show that, and nothing beside it."""
        agent = tmp_path / "agents" / "mine"
        agent.mkdir(parents=True)
        tool(agent / "agent", "echo working")
        (tmp_path / "agents" / "other").write_text("hidden")
        (tmp_path / "trial").mkdir()
        harness = SandboxHarness(tmp_path / "trial", sandbox_of("bwrap", readable=(agent,)))
        said = harness.output_of(harness.command('"$1"/agent; touch "$1"/x; ls "$1"/..; exit 0', str(agent)))
        assert said == "working\nmine\n"
        assert not (agent / "x").exists()


class TestGroup:
    def test_version_2_groups_are_made_beside_our_own(self, tmp_path, monkeypatch):
        """Given a slice that was delegated to us, then a room's group is made in it, and gone with the room."""
        (tmp_path / "user.slice/ours.scope").mkdir(parents=True)
        monkeypatch.setattr(cgroup, "_ROOT", tmp_path)
        (tmp_path / "cgroup").write_text("0::/user.slice/ours.scope\n")
        monkeypatch.setattr(cgroup, "_OWN_GROUPS", tmp_path / "cgroup")
        group = Cgroup.create("room-1", 40)
        assert (tmp_path / "user.slice/room-1/pids.max").read_text() == "40"
        assert group.join_file == str(tmp_path / "user.slice/room-1/cgroup.procs")
        # The kernel's own files go with their directory.
        (tmp_path / "user.slice/room-1/pids.max").unlink()
        asyncio.run(group.close())
        assert not (tmp_path / "user.slice/room-1").exists()

    def test_where_there_can_be_none_there_is_none(self, tmp_path, monkeypatch):
        monkeypatch.setattr(cgroup, "_ROOT", tmp_path / "nowhere")
        group = Cgroup.create("room-1", 40)
        assert group.join_file == ""
        asyncio.run(group.close())


class TestStale:
    def test_what_a_killed_process_left_is_removed(self, tmp_path, monkeypatch):
        """Given the scratch of a process that is gone and one of ours, only the first is removed."""
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        gone = tmp_path / "loopwright-sandbox-999999999-1-abc"
        ours = tmp_path / f"loopwright-sandbox-{os.getpid()}-{start_ticks(os.getpid())}-abc"
        gone.mkdir()
        ours.mkdir()
        remove_stale.__wrapped__()
        assert (gone.exists(), ours.exists()) == (False, True)


class TestDocker:
    """Against a `docker` whose daemon runs the commands by itself."""

    @pytest.fixture
    def docker(self, tmp_path, monkeypatch):
        with tempfile.TemporaryDirectory() as home:  # a socket's path must be short
            fake = FakeDocker(Path(home))
            monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
            (tmp_path / "trial").mkdir()
            remove_stale_containers.cache_clear()
            yield fake
            fake.close()

    def test_a_command_is_a_container_without_powers_or_network(self, docker, tmp_path):
        harness = SandboxHarness(tmp_path / "trial", sandbox_of("docker", Bounds(memory_bytes=1000, processes=7)))
        harness.mount_at = "/app"
        [done] = harness.run_all(harness.command("exit 3"))
        version, _, run, removed = docker.asked
        assert done.exit_code == 3
        assert version[0] == "version"
        options = run[: run.index("python:3.11-slim")]
        assert run[len(options) + 1 :] == ["/bin/sh", "-c", "exit 3", "script"]
        assert options[options.index("--network") + 1] == "none"
        assert options[options.index("--workdir") + 1] == "/app"
        assert {
            *("--cap-drop=ALL", "--security-opt=no-new-privileges", f"--user={os.getuid()}:{os.getgid()}"),
            *("--pids-limit=7", "--memory=1000", "--memory-swap=1000"),
            f"--mount=type=bind,source={harness.workspace},target=/app",
        } <= set(options)
        assert removed[:2] == ["rm", "--force"]
        assert run[run.index("--name") + 1] in removed

    def test_secrets_go_by_file_and_the_file_is_gone(self, docker, tmp_path):
        harness = SandboxHarness(tmp_path / "trial", sandbox_of("docker"))
        command = harness.command('echo "$SESSION_KEY" "$LONG"')
        keys = {"SESSION_KEY": "sk-1", "LONG": "sk-2\n it's"}
        said = harness.output_of(replace(command, environment={**command.environment, **keys}))
        assert said == "sk-1 sk-2\n it's\n"
        run = docker.asked[2]
        assert not [word for word in run if "sk-" in word]
        assert not Path(run[run.index("--env-file") + 1]).exists()

    def test_what_its_client_left_behind_is_gone_before_the_next_command_and_after_the_room(self, docker, tmp_path):
        """Given an agent that ignores its end, it is not there while the tests run."""
        harness = SandboxHarness(tmp_path / "trial", sandbox_of("docker"))
        stubborn = harness.command("trap '' TERM; while :; do touch beat; sleep 0.01; done", timeout_s=1.0)
        harness.run_all(stubborn, harness.command("rm beat; sleep 0.2; ls"))
        assert harness.stdout == ""
        harness.run_all(stubborn)
        assert docker.running() == []

    def test_a_container_that_cannot_be_removed_lets_no_command_begin(self, docker, tmp_path):
        docker._rm = lambda *_: 1
        harness = SandboxHarness(tmp_path / "trial", sandbox_of("docker"))
        stubborn = harness.command("trap '' TERM; while :; do sleep 0.01; done", timeout_s=1.0)
        with pytest.raises(AssertionError, match="cannot be removed"):
            harness.run_all(stubborn, harness.command("true"))

    def test_a_command_that_ends_as_if_it_had_not_begun_has_begun(self, docker, tmp_path):
        """Else an agent could have its failures blamed on the machine."""
        harness = SandboxHarness(tmp_path / "trial", sandbox_of("docker"))
        assert [done.exit_code for done in harness.run_all(harness.command("exit 125"))] == [125]

    def test_containers_of_a_process_that_was_killed_are_removed(self, docker, tmp_path):
        """Those of others at work, here or on other machines that use the daemon too, are not."""
        own = f"{os.getpid()}-{start_ticks(os.getpid())}"
        for name, machine, owner in (
            ("stale", _machine(), f"{os.getpid()}-1"),
            ("ours", _machine(), own),
            ("elsewhere", "another", "999999999-1"),
        ):
            docker.leave(name, **{"loopwright.machine": machine, "loopwright.owner": owner})
        harness = SandboxHarness(tmp_path / "trial", sandbox_of("docker"))
        harness.run_all(harness.command("true"))
        assert docker.running() == ["ours", "elsewhere"]
        assert {f"--label=loopwright.machine={_machine()}", f"--label=loopwright.owner={own}"} <= set(docker.asked[3])

    def test_what_is_hidden_is_empty_where_the_place_around_it_can_be_seen(self, docker, tmp_path):
        tasks, other = tmp_path / "tasks", tmp_path / "other"
        (tasks / "one").mkdir(parents=True)
        other.mkdir()
        harness = SandboxHarness(tmp_path / "trial", sandbox_of("docker", readable=(tasks,)))
        harness.hide = (tasks / "one", other)
        harness.run_all(harness.command("true"))
        mounts = [word for word in docker.asked[2] if word.startswith("--mount=") and word.endswith(",readonly")]
        assert mounts[0] == f"--mount=type=bind,source={tasks},target={tasks},readonly"
        assert mounts[1].endswith(f"/nothing,target={tasks / 'one'},readonly")
        assert len(mounts) == 2

    @pytest.mark.parametrize("bounds", [Bounds(cpu_s=9.5), Bounds(disk_bytes=5000)])
    def test_bounds_that_it_cannot_hold_are_refused(self, bounds):
        with pytest.raises(SandboxError, match="neither `cpu_s` nor `disk`"):
            sandbox_of("docker", bounds)

    def test_a_daemon_that_gives_no_answer_is_not_waited_for(self, tmp_path, monkeypatch):
        tool(tmp_path / "docker", "exec sleep 100")
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr("loopwright.execution.sandbox.docker._CHECK_TIMEOUT_S", 0.2)
        with pytest.raises(SandboxError, match="no response from its daemon"):
            sandbox_of("docker").check()

    def test_its_doors_are_opened_in_a_container_and_lead_to_us(self, docker, tmp_path):
        """Given a room that may reach a URL, a container without network opens the door, and the command shares it."""

        async def main():
            async def answer(reader, writer):
                writer.write(b"hello")
                writer.close()

            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            # The fake shares our network, so the door must not be the harness itself; this is 127.0.0.1, as a name.
            url = f"http://127.1:{port}"
            sandbox = sandbox_of("docker")
            async with server, sandbox.open(tmp_path / "trial", allowed_urls=(url,)) as room:
                assert room.url_inside(url) == url
                reader, writer = await asyncio.open_connection("127.77.0.1", port)
                assert await reader.read() == b"hello"
                writer.close()
                return room.wrap(SandboxHarness(tmp_path / "trial", sandbox).command("true")).argv, docker.asked[2]

        argv, gate = asyncio.run(main())
        assert gate[gate.index("--network") + 1] == "none"
        assert "--add-host=127.1:127.77.0.1" in gate
        assert argv[argv.index("--network") + 1] == f"container:{gate[gate.index('--name') + 1]}"
