"""Docker sandboxes, against a fake `docker` whose daemon runs the commands itself."""

import asyncio
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from tests.execution.sandbox.fake_docker import FakeDocker, write_script

from loopwright.execution.local.processes import start_ticks
from loopwright.execution.sandbox import Bounds, SandboxError, sandbox_of
from loopwright.execution.sandbox.docker import _machine, remove_stale_containers
from loopwright.testing.sandboxes import SandboxHarness


@pytest.fixture
def docker(tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory() as home:  # a socket's path must be short
        fake = FakeDocker(Path(home))
        monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
        (tmp_path / "trial").mkdir()
        remove_stale_containers.cache_clear()
        yield fake
        fake.close()


def test_a_missing_daemon_is_reported(tmp_path, monkeypatch):
    write_script(tmp_path / "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match=r"Cannot connect to the Docker daemon.*systemctl start docker"):
        sandbox_of("docker").check()


def test_missing_docker_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="needs Docker"):
        sandbox_of("docker").check()


def test_a_command_is_a_container_without_privileges_or_network(docker, tmp_path):
    harness = SandboxHarness(tmp_path / "trial", sandbox_of("docker", Bounds(memory_bytes=1000, processes=7)))
    harness.mount_at = "/app"
    [done] = harness.run_all(harness.command("exit 3"))
    version, run, removed = docker.requests[0], *docker.calls("run", "rm")
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
    assert any(word.startswith("--security-opt=seccomp=") for word in options), "the fake's version is unknown"
    assert removed[:2] == ["rm", "--force"]
    assert run[run.index("--name") + 1] in removed


def test_secrets_are_passed_in_a_file_that_is_removed(docker, tmp_path):
    harness = SandboxHarness(tmp_path / "trial", sandbox_of("docker"))
    command = harness.command('echo "$SESSION_KEY" "$LONG"')
    keys = {"SESSION_KEY": "sk-1", "LONG": "sk-2\n it's"}
    output = harness.output_of(replace(command, environment={**command.environment, **keys}))
    assert output == "sk-1 sk-2\n it's\n"
    (run,) = docker.calls("run")
    assert not [word for word in run if "sk-" in word]
    assert not Path(run[run.index("--env-file") + 1]).exists()


def test_a_container_is_removed_before_the_next_command_and_at_the_end(docker, tmp_path):
    """Given an agent that ignores SIGTERM, it is gone when the tests run."""
    harness = SandboxHarness(tmp_path / "trial", sandbox_of("docker"))
    stubborn = harness.command("trap '' TERM; while :; do touch beat; sleep 0.01; done", timeout_s=1.0)
    harness.run_all(stubborn, harness.command("rm beat; sleep 0.2; ls"))
    assert harness.stdout == ""
    harness.run_all(stubborn)
    assert docker.running() == []


def test_no_command_starts_while_the_previous_container_remains(docker, tmp_path):
    docker._rm = lambda *_: 1
    harness = SandboxHarness(tmp_path / "trial", sandbox_of("docker"))
    stubborn = harness.command("trap '' TERM; while :; do sleep 0.01; done", timeout_s=1.0)
    with pytest.raises(AssertionError, match="cannot be removed"):
        harness.run_all(stubborn, harness.command("true"))


def test_a_command_may_exit_with_the_code_of_docker_itself(docker, tmp_path):
    """Otherwise an agent could blame its failures on the machine."""
    harness = SandboxHarness(tmp_path / "trial", sandbox_of("docker"))
    assert [done.exit_code for done in harness.run_all(harness.command("exit 125"))] == [125]


def test_a_command_whose_client_lost_its_daemon_failed_because_of_the_machine(docker, tmp_path):
    """Given a container that did not end, although `docker run` did, its sandbox is to blame."""
    docker._inspect = lambda *_: 1
    harness = SandboxHarness(tmp_path / "trial", sandbox_of("docker"))
    with pytest.raises(AssertionError, match="setup_failed"):
        harness.run_all(harness.command("exit 125"))


def test_containers_of_a_killed_process_are_removed(docker, tmp_path):
    """Those of running processes, and of other machines that use the same daemon, are not."""
    own = f"{os.getpid()}-{start_ticks(os.getpid())}"
    for name, machine, owner in (
        ("stale", _machine(), f"{os.getpid()}-1"),
        ("ours", _machine(), own),
        ("elsewhere", "another", "999999999-1"),
    ):
        docker.start_orphan(name, **{"loopwright.machine": machine, "loopwright.owner": owner})
    harness = SandboxHarness(tmp_path / "trial", sandbox_of("docker"))
    harness.run_all(harness.command("true"))
    assert docker.running() == ["ours", "elsewhere"]
    assert {f"--label=loopwright.machine={_machine()}", f"--label=loopwright.owner={own}"} <= set(
        docker.calls("run")[0]
    )


def test_hidden_directories_are_empty_below_readable_ones(docker, tmp_path):
    tasks, other = tmp_path / "tasks", tmp_path / "other"
    (tasks / "one").mkdir(parents=True)
    other.mkdir()
    harness = SandboxHarness(tmp_path / "trial", sandbox_of("docker", readable=(tasks,)))
    harness.hide = (tasks / "one", other)
    harness.run_all(harness.command("true"))
    mounts = [word for word in docker.calls("run")[0] if word.startswith("--mount=") and word.endswith(",readonly")]
    assert mounts[0] == f"--mount=type=bind,source={tasks},target={tasks},readonly"
    assert mounts[1].endswith(f"/nothing,target={tasks / 'one'},readonly")
    assert len(mounts) == 2


@pytest.mark.parametrize("bounds", [Bounds(cpu_s=9.5), Bounds(disk_bytes=5000)])
def test_unsupported_bounds_are_refused(bounds):
    with pytest.raises(SandboxError, match="neither `cpu_s` nor `disk`"):
        sandbox_of("docker", bounds)


def test_an_unresponsive_daemon_times_out(tmp_path, monkeypatch):
    write_script(tmp_path / "docker", "exec sleep 100")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("loopwright.execution.sandbox.docker._CHECK_TIMEOUT_S", 0.2)
    with pytest.raises(SandboxError, match="no response from its daemon"):
        sandbox_of("docker").check()


def test_allowed_urls_are_forwarded_from_a_container(docker, tmp_path):
    """Given an allowed URL, a container without a network opens the port, and the command shares its network."""

    async def main():
        async def answer(reader, writer):
            writer.write(b"hello")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        # The fake shares our network, so the forwarded port needs another address than the server: 127.1 is a name.
        url = f"http://127.1:{port}"
        sandbox = sandbox_of("docker")
        async with server, sandbox.open(tmp_path / "trial", allowed_urls=(url,)) as instance:
            assert instance.url_inside(url) == url
            reader, writer = await asyncio.open_connection("127.77.0.1", port)
            assert await reader.read() == b"hello"
            writer.close()
            return instance.wrap(SandboxHarness(tmp_path / "trial", sandbox).command("true")).argv, docker.calls("run")[
                0
            ]

    argv, proxy = asyncio.run(main())
    assert proxy[proxy.index("--network") + 1] == "none"
    assert "--add-host=127.1:127.77.0.1" in proxy
    assert argv[argv.index("--network") + 1] == f"container:{proxy[proxy.index('--name') + 1]}"
