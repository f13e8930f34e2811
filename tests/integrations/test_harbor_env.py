"""Harbor's local environment, without Harbor: what an agent leaves behind cannot reach other files."""

import asyncio
import logging
import shutil
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

NAME = "loopwright.integrations.harbor_env"
pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")


class Base:
    """The parts of Harbor that LocalEnvironment uses."""

    logger = logging.getLogger(__name__)
    task_env_config = SimpleNamespace(workdir=None, docker_image=None)
    _network_disabled = True

    def _resolve_user(self, user):
        return user

    def _merge_env(self, env):
        return env

    def _mount_targets(self, writable_only):
        return []

    async def ensure_dirs(self, dirs): ...

    async def _upload_environment_dir_after_start(self): ...


@pytest.fixture
def environment(monkeypatch):
    harbor = {name: ModuleType(name) for name in ("harbor", "harbor.environments")}
    harbor["harbor.environments.base"] = SimpleNamespace(BaseEnvironment=Base, ExecResult=SimpleNamespace)
    harbor["harbor.environments.capabilities"] = SimpleNamespace(EnvironmentCapabilities=SimpleNamespace)
    for name, module in harbor.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    environment = import_module(NAME).LocalEnvironment()
    asyncio.run(environment.start(force_build=False))
    yield environment
    asyncio.run(environment.stop(delete=True))
    sys.modules.pop(NAME, None)


def output_of(environment, command, **options):
    result = asyncio.run(environment.exec(command, **options))
    assert result.return_code == 0, result.stderr
    return result.stdout


def test_files_are_uploaded_and_downloaded(environment, tmp_path):
    (tmp_path / "tests/sub").mkdir(parents=True)
    (tmp_path / "tests/sub/test.sh").write_text("echo tested > /logs/deep/said")
    (tmp_path / "tests/sub/test.sh").chmod(0o755)
    (tmp_path / "one").write_text("1")
    asyncio.run(environment.upload_dir(tmp_path / "tests", "/tests"))
    asyncio.run(environment.upload_file(tmp_path / "one", "/data/new/one"))
    assert output_of(environment, "cat /data/new/one; mkdir /logs/deep; /tests/sub/test.sh; pwd") == "1/app\n"
    asyncio.run(environment.download_dir("/logs", tmp_path / "logs"))
    asyncio.run(environment.download_file("/logs/deep/said", tmp_path / "far/said"))
    assert (tmp_path / "logs/deep/said").read_text() == (tmp_path / "far/said").read_text() == "tested\n"
    with pytest.raises(OSError, match="/logs/none"):
        asyncio.run(environment.download_file("/logs/none", tmp_path / "none"))


def test_symlinks_lead_neither_reads_nor_writes_out_of_the_sandbox(environment, tmp_path):
    """Links that an agent makes to files of this machine neither change nor reveal them."""
    outside, secret = tmp_path / "outside", tmp_path / "outside/secret"
    outside.mkdir()
    secret.write_text("precious")
    (tmp_path / "tests/sub").mkdir(parents=True)
    for name in ("test.sh", "sub/more.sh"):
        (tmp_path / "tests" / name).write_text("echo ours")
    output_of(environment, f"ln -s {secret} /tests/test.sh; ln -s {outside} /tests/sub; ln -s {secret} /app/file")
    output_of(
        environment, f"ln -s {secret} /logs/file; ln -s {outside} /logs/folder; mkfifo /logs/pipe; echo hi > /logs/own"
    )

    asyncio.run(environment.upload_dir(tmp_path / "tests", "/tests"))
    asyncio.run(environment.upload_file(tmp_path / "tests/test.sh", "/app/file"))
    asyncio.run(environment.download_dir("/logs", tmp_path / "logs"))
    with pytest.raises(OSError, match="cannot be copied"):
        asyncio.run(environment.download_file("/logs/file", tmp_path / "file"))

    assert [(path.name, path.read_text()) for path in outside.iterdir()] == [("secret", "precious")]
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["own"]
    assert output_of(environment, "bash /tests/test.sh; bash /tests/sub/more.sh; bash /app/file") == "ours\n" * 3


def test_the_sandbox_has_no_capabilities_and_shows_only_named_paths(environment):
    output = output_of(
        environment, "grep Cap /proc/self/status; ls / /etc; mount -t tmpfs none /tmp 2>/dev/null || echo no"
    )
    powers, entries = output.splitlines()[:5], set(output.splitlines()[5:])
    assert {line.split()[1].strip("0") for line in powers} == {""}
    assert "no" in entries
    assert not entries & {"shadow", "home", "work", "srv", "opt", "mnt", "boot", "sudoers"}


def test_its_output_is_bounded(environment, monkeypatch):
    monkeypatch.setattr(f"{NAME}._MAX_OUTPUT", 1000)
    assert len(output_of(environment, "head -c 1000000 /dev/zero | tr '\\0' x")) == 1000
    with pytest.raises(TimeoutError):
        output_of(environment, "sleep 100", timeout_sec=0.2)


def test_daemons_survive_a_command_and_end_with_the_environment(environment):
    """As the tmux server of terminus-2 must; a daemon that keeps its output open does not delay its command."""
    output_of(environment, "nohup sleep 1234567 & echo $! > /tmp/pid")
    assert output_of(environment, "tr '\\0' ' ' < /proc/$(cat /tmp/pid)/cmdline") == "sleep 1234567 "
    output_of(environment, "kill -9 1; kill -TERM 1; true")
    assert output_of(environment, "echo alive") == "alive\n", "process 1 cannot be killed from inside"
    assert _is_running("sleep", "1234567")
    asyncio.run(environment.stop(delete=True))
    assert not _is_running("sleep", "1234567")


def test_no_zombies_are_left(environment):
    output_of(environment, "(sleep 0.01 & sleep 0.01 &) ; sleep 0.3")
    assert "Z" not in output_of(environment, "ps -e -o stat=")


def test_only_tasks_that_need_no_image_are_accepted(environment, tmp_path):
    environment.environment_dir = tmp_path / "environment"
    environment.task_env_config = SimpleNamespace(workdir=None, docker_image="debian:12-slim")
    (tmp_path / "task.toml").write_text("")
    with pytest.raises(ValueError, match=r"docker_image: 'debian:12-slim' needs an environment that can run images"):
        environment._validate_definition()
    (tmp_path / "task.toml").write_text("[metadata]\nneeds_image = false\n")
    environment._validate_definition()


def _is_running(*argv):
    command_line = b"\0".join(word.encode() for word in argv)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().startswith(command_line):
                return True
    return False
