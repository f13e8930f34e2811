"""Rooms by Docker, for machines with its daemon; experimental. Each command is a container over the same directories.

The network is that of a small container without any, in which gate_main.py opens the doors: the forwarding is ours, as
with bubblewrap. A container outlives the `docker` that started it: each is removed before the next command begins, the
last one with the room, and those of a process that was killed by the next one of ours.
"""

import asyncio
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import ClassVar

from loopwright.execution.base import Command, Completion
from loopwright.execution.local.processes import start_ticks
from loopwright.execution.sandbox import network_proxy_main as gate_main
from loopwright.execution.sandbox.base import NO_MOUNTS, Bounds, Sandbox, SandboxError, SandboxInstance
from loopwright.execution.sandbox.bubblewrap import remove_stale
from loopwright.execution.sandbox.files import remove
from loopwright.execution.sandbox.network_proxy import NetworkProxy, received
from loopwright.execution.sandbox.status import TRUE_STATUS

IMAGE = "python:3.11-slim"
_TIMEOUT_S = 120.0
_CHECK_S = 10.0
_OPENS_WITHIN_S = 30.0
_NEVER_BEGAN = 125
"""What `docker run` ends with if there was no container."""
_MACHINE, _OWNER = "loopwright.machine", "loopwright.owner"
"""Labels: whose container it is."""
_VARIABLES = "/run/loopwright-variables"
_PRIVATE = ("/root", "/tmp", "/dev/shm")  # noqa: S108  These are the room's own.

# The client of the container before may have been killed, which ends no container.
_ALONE = """
docker rm --force --volumes "$0" >/dev/null 2>&1
[ -z "$(docker ps --quiet --filter "name=^$0\\$")" ] || { echo "container $0 cannot be removed" >&2; exit 125; }
exec "$@"
"""


class Docker(Sandbox):
    """Makes rooms from an image, which needs Python 3 if its rooms are to reach anything."""

    def __init__(
        self,
        bounds: Bounds = Bounds(),  # noqa: B008  frozen
        readable: tuple[Path, ...] = (),
        image: str = IMAGE,
    ) -> None:
        super().__init__(bounds)
        self._readable, self._image = tuple(path.absolute() for path in readable), image
        if bounds.cpu_s is not None or bounds.disk_bytes is not None:
            raise SandboxError(
                'sandbox = "docker" holds `memory` and `processes` of the bounds, and neither `cpu_s` nor `disk` for '
                'all processes together. Leave these out, or use "bwrap".'
            )

    def check(self) -> None:
        """See `Sandbox.check`."""
        if shutil.which("docker") is None:
            raise SandboxError('sandbox = "docker" needs Docker. Install it (https://docs.docker.com), or use "bwrap".')
        try:
            done = _docker("version", "--format", "{{.Server.Version}}", timeout_s=_CHECK_S)
        except subprocess.TimeoutExpired as error:
            said = f'sandbox = "docker": its daemon gave no answer within {_CHECK_S:g} s. Restart it, or use "bwrap".'
            raise SandboxError(said) from error
        if done.returncode:
            raise SandboxError(
                f'sandbox = "docker": {done.stderr.strip() or "no answer"}. '
                'Start the daemon (systemctl start docker), set DOCKER_HOST, or use "bwrap".'
            )

    @asynccontextmanager
    async def open(
        self,
        workspace: Path,
        *,
        allowed_urls: tuple[str, ...] = (),
        mount_at: str | None = None,
        hide: tuple[Path, ...] = (),
    ) -> AsyncIterator[SandboxInstance]:
        """See `Sandbox.open`."""
        await asyncio.to_thread(self.check)
        await asyncio.to_thread(remove_stale_containers)
        await asyncio.to_thread(remove_stale)
        gate = NetworkProxy(allowed_urls)
        hidden = tuple(path.absolute() for path in hide)
        room = _Instance(workspace, mount_at, gate, self.bounds, self._readable, self._image, hidden)
        try:
            if allowed_urls:
                await gate.serve(await asyncio.to_thread(room.open_gate))
            yield room
        finally:
            await gate.close()
            await asyncio.to_thread(room.close)


class _Instance(SandboxInstance):
    has_own_paths: ClassVar[bool] = True

    def __init__(
        self,
        workspace: Path,
        mount_at: str | None,
        gate: NetworkProxy,
        bounds: Bounds,
        readable: tuple[Path, ...],
        image: str,
        hide: tuple[Path, ...],
    ) -> None:
        super().__init__(workspace.absolute())
        self._at = mount_at or str(self.workspace)
        self._gate, self._bounds, self._readable, self._image = gate, bounds, readable, image
        # What is not readable is not there.
        self._hide = [path for path in hide if any(path.is_relative_to(place) for place in readable) and path.exists()]
        self._scratch = Path(tempfile.mkdtemp(prefix=f"loopwright-room-{_owner()}-"))
        self._private = {name: self._scratch / name.strip("/").replace("/", "-") for name in _PRIVATE}
        for place in (*self._private.values(), self._scratch / "gate", self._scratch / "nothing"):
            place.mkdir()
        self._name = f"loopwright-{uuid.uuid4().hex}"
        self._containers: list[str] = []
        self._caller: socket.socket | None = None

    def path_inside(self, path: Path) -> str:
        """See `SandboxInstance.path_inside`."""
        return str(PurePosixPath(self._at) / path.absolute().relative_to(self.workspace))

    def url_inside(self, url: str) -> str:
        """See `SandboxInstance.url_inside`."""
        return self._gate.url_inside(url)

    def setup_failed(self, completion: Completion) -> bool:
        """See `SandboxInstance.setup_failed`."""
        # Commands may end with the same code, but then there was a container.
        return completion.exit_code == _NEVER_BEGAN and not self._made(self._containers[-1]).exists()

    def wrap(
        self, command: Command, mounts: Mapping[str, Path] = NO_MOUNTS, fixed: Mapping[str, Path] = NO_MOUNTS
    ) -> Command:
        """See `SandboxInstance.wrap`."""
        self._gate.shut, self._settled = self._settled, False
        before = self._containers[-1:] if len(self._containers) > bool(self._gate.doors) else []
        name = self._container()
        given = {"HOME": _PRIVATE[0], **command.environment}
        # Docker's own file has one variable per line; the others are read by a shell inside.
        longer = {key: value for key, value in given.items() if "\n" in value}
        environment = self._written(f"{name}.env", (f"{k}={v}" for k, v in given.items() if k not in longer))
        variables = self._written(f"{name}.sh", (f"export {k}={shlex.quote(v)}" for k, v in longer.items()))
        places = {**self._private, self._at: self.workspace, **mounts}
        shown = {str(path): path for path in self._readable} | {
            str(path): self._scratch / "nothing" for path in self._hide
        }
        shown |= {**fixed, **({_VARIABLES: variables} if longer else {})}
        argv = (
            *("docker", "run", "--rm", "--init", "--name", name, "--cidfile", str(self._made(name)), *self._walls()),
            *("--network", f"container:{self._containers[0]}" if self._gate.doors else "none"),
            *(f"--mount=type=bind,source={path},target={inside}" for inside, path in places.items()),
            *(f"--mount=type=bind,source={path},target={inside},readonly" for inside, path in shown.items()),
            *("--workdir", self.path_inside(command.directory), "--env-file", str(environment), self._image),
            *(("/bin/sh", "-c", '. "$0" && exec "$@"', _VARIABLES) if longer else ()),
            *command.argv,
        )
        alone = ("/bin/sh", "-c", _ALONE, *before) if before else ()
        outside = ("/bin/sh", "-c", TRUE_STATUS, str(environment))
        return replace(command, argv=(*outside, *alone, *argv), environment=_environment())

    def _made(self, name: str) -> Path:
        """The file that is there once this container is."""
        return self._scratch / f"{name}.id"

    def _written(self, name: str, lines: Iterable[str]) -> Path:
        """A file that only we and the command can read."""
        path = self._scratch / name
        path.touch(mode=0o600)
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    def open_gate(self) -> list[socket.socket]:
        """Start the container that opens the doors; they come out through a socket in a directory that it sees."""
        doors = self._gate.doors.values()
        place = self._scratch / "gate"
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.bind(str(place / gate_main.DOOR))
            waiting.listen()
            waiting.settimeout(_OPENS_WITHIN_S)
            done = _docker(
                *("run", "--detach", "--rm", "--name", self._container(), "--network", "none", *self._walls()),
                *(f"--add-host={door.host}:{door.address}" for door in doors if door.named),
                *(f"--mount=type=bind,source={place},target=/gate", "--cap-add=NET_BIND_SERVICE"),
                f"--mount=type=bind,source={gate_main.__file__},target=/gate_main.py,readonly",
                *(self._image, "python3", "-IS", "/gate_main.py", "/gate", ""),
                *(f"{door.address}:{door.port}" for door in doors),
            )
            if done.returncode:
                raise SandboxError(f"the network of a docker room cannot be made: {done.stderr.strip()}")
            try:
                caller, _ = waiting.accept()
            except TimeoutError as error:
                raise SandboxError(f"the image {self._image} did not open its doors; it needs python3.") from error
        # It stays for as long as this is open; the network would go with it.
        self._caller = caller
        _, files = received(caller, len(doors) + 3)
        for file in files[len(doors) :]:
            os.close(file)
        return [socket.socket(fileno=file) for file in files[: len(doors)]]

    def close(self) -> None:
        """Remove the containers, with whatever still runs in them."""
        if self._caller is not None:
            self._caller.close()
        if self._containers:
            _docker("rm", "--force", "--volumes", *reversed(self._containers))
        remove(self._scratch)

    def _container(self) -> str:
        self._containers.append(f"{self._name}-{len(self._containers)}")
        return self._containers[-1]

    def _walls(self) -> Iterator[str]:
        bounds = self._bounds
        yield from (f"--user={os.getuid()}:{os.getgid()}", "--cap-drop=ALL", "--security-opt=no-new-privileges")
        yield from ("--ulimit=core=0", f"--label={_MACHINE}={_machine()}", f"--label={_OWNER}={_owner()}")
        if bounds.processes is not None:
            yield f"--pids-limit={bounds.processes}"
        if bounds.memory_bytes is not None:
            yield from (f"--memory={bounds.memory_bytes}", f"--memory-swap={bounds.memory_bytes}")


@cache
def remove_stale_containers() -> None:
    """Remove the containers that a killed process of ours left; once."""
    told = ("--format", f'{{{{.ID}}}} {{{{.Label "{_OWNER}"}}}}')
    listed = _docker("ps", "--all", "--filter", f"label={_MACHINE}={_machine()}", *told)
    owned = [line.split() for line in listed.stdout.splitlines()]
    if stale := [words[0] for words in owned if words[1:] and words[1] != _owner(int(words[1].partition("-")[0]))]:
        _docker("rm", "--force", "--volumes", *stale)


def _machine() -> str:
    """This machine since it started, and the process ids that we see: others may use the same daemon."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{Path('/proc/self/ns/pid').stat().st_ino}"


def _owner(pid: int | None = None) -> str:
    """A process; without an id, this one."""
    pid = os.getpid() if pid is None else pid
    return f"{pid}-{start_ticks(pid)}"


def _docker(*arguments: str, timeout_s: float = _TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    argv = ("docker", *arguments)
    return subprocess.run(argv, capture_output=True, text=True, env=_environment(), timeout=timeout_s, check=False)


def _environment() -> dict[str, str]:
    """What the `docker` command needs of our own to find its daemon; nothing that a task could have given."""
    wanted = ("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY")
    return {name: os.environ[name] for name in wanted if name in os.environ}
