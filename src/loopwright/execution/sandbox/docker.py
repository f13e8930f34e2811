"""Rooms by Docker, for machines with its daemon; experimental. Each command is a container over the same directories.

The network is that of a small container without any, in which gate_main.py opens the doors: the forwarding is ours, as
with bubblewrap. A container outlives the `docker` that started it, so those of a room are removed with the room.
"""

import asyncio
import math
import os
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import ClassVar

from loopwright.execution.base import Command, Completion
from loopwright.execution.sandbox import gate_main
from loopwright.execution.sandbox.base import NO_MOUNTS, Bounds, Room, Sandbox, SandboxError
from loopwright.execution.sandbox.files import remove
from loopwright.execution.sandbox.gate import Gate
from loopwright.execution.sandbox.status import TRUE_STATUS

IMAGE = "python:3.11-slim"
_TIMEOUT_S = 120.0
_OPENS_WITHIN_S = 30.0
_NEVER_BEGAN = 125
"""What `docker run` ends with if there was no container."""
_PRIVATE = ("/root", "/tmp", "/dev/shm")  # noqa: S108  These are the room's own.


class Docker(Sandbox):
    """Makes rooms from an image, which needs Python 3 if its rooms are to reach anything."""

    def __init__(
        self,
        bounds: Bounds = Bounds(),  # noqa: B008  frozen
        readable: tuple[Path, ...] = (),
        image: str = IMAGE,
    ) -> None:
        super().__init__(bounds)
        self._readable, self._image = readable, image

    def check(self) -> None:
        """See `Sandbox.check`."""
        if shutil.which("docker") is None:
            raise SandboxError('sandbox = "docker" needs Docker. Install it (https://docs.docker.com), or use "bwrap".')
        done = _docker("version", "--format", "{{.Server.Version}}")
        if done.returncode:
            raise SandboxError(
                f'sandbox = "docker": {done.stderr.strip() or "no answer"}. '
                'Start the daemon (systemctl start docker), set DOCKER_HOST, or use "bwrap".'
            )

    @asynccontextmanager
    async def room(
        self,
        workspace: Path,
        *,
        reach: tuple[str, ...] = (),
        at: str | None = None,
        hide: tuple[Path, ...] = (),
    ) -> AsyncIterator[Room]:
        """See `Sandbox.room`."""
        await asyncio.to_thread(self.check)
        gate = Gate(reach)
        room = _Room(workspace, at, gate, self.bounds, self._readable, self._image)
        try:
            if reach:
                await gate.serve(await asyncio.to_thread(room.open_gate))
            yield room
        finally:
            await gate.close()
            await asyncio.to_thread(room.close)


class _Room(Room):
    mounts: ClassVar[bool] = True

    def __init__(
        self, workspace: Path, at: str | None, gate: Gate, bounds: Bounds, readable: tuple[Path, ...], image: str
    ) -> None:
        super().__init__(workspace.absolute())
        self._at = at or str(self.workspace)
        self._gate, self._bounds, self._readable, self._image = gate, bounds, readable, image
        self._scratch = Path(tempfile.mkdtemp(prefix="loopwright-docker-"))
        self._private = {name: self._scratch / name.strip("/").replace("/", "-") for name in _PRIVATE}
        for place in (*self._private.values(), self._scratch / "gate"):
            place.mkdir()
        self._name = f"loopwright-{uuid.uuid4().hex}"
        self._containers: list[str] = []
        self._caller: socket.socket | None = None

    def inside(self, path: Path) -> str:
        """See `Room.inside`."""
        return str(PurePosixPath(self._at) / path.absolute().relative_to(self.workspace))

    def reachable(self, url: str) -> str:
        """See `Room.reachable`."""
        return self._gate.reachable(url)

    def failed(self, completion: Completion) -> bool:
        """See `Room.failed`."""
        return completion.exit_code == _NEVER_BEGAN

    def command(self, command: Command, mounts: Mapping[str, Path] = NO_MOUNTS) -> Command:
        """See `Room.command`."""
        name = self._container()
        environment = self._scratch / f"{name}.env"
        environment.touch(mode=0o600)
        given = {"HOME": _PRIVATE[0], **command.environment}
        # A file has one variable per line; those that are longer are rare, and no secrets.
        lines = {key: value for key, value in given.items() if "\n" not in value}
        environment.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
        longer = [f"--env={key}={value}" for key, value in given.items() if key not in lines]
        places = {**self._private, self._at: self.workspace, **mounts}
        argv = (
            *("docker", "run", "--rm", "--init", "--name", name, *self._walls()),
            *("--network", f"container:{self._containers[0]}" if self._gate.doors else "none"),
            *(f"--mount=type=bind,source={path},target={inside}" for inside, path in places.items()),
            *(f"--mount=type=bind,source={path},target={path},readonly" for path in self._readable),
            *("--workdir", self.inside(command.directory), "--env-file", str(environment), *longer),
            *(self._image, *command.argv),
        )
        outside = ("/bin/sh", "-c", TRUE_STATUS, str(environment))
        return replace(command, argv=(*outside, *argv), environment=_environment())

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
        _, files, _, _ = socket.recv_fds(caller, 256, len(doors) + 3)
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
        yield "--ulimit=core=0"
        if bounds.processes is not None:
            yield f"--pids-limit={bounds.processes}"
        if bounds.memory_bytes is not None:
            yield from (f"--memory={bounds.memory_bytes}", f"--memory-swap={bounds.memory_bytes}")
        if bounds.cpu_s is not None:
            yield f"--ulimit=cpu={math.ceil(bounds.cpu_s)}"
        if bounds.disk_bytes is not None:
            yield f"--ulimit=fsize={bounds.disk_bytes}"


def _docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = ("docker", *arguments)
    return subprocess.run(argv, capture_output=True, text=True, env=_environment(), timeout=_TIMEOUT_S, check=False)


def _environment() -> dict[str, str]:
    """What the `docker` command needs of our own to find its daemon; nothing that a task could have given."""
    wanted = ("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY")
    return {name: os.environ[name] for name in wanted if name in os.environ}
