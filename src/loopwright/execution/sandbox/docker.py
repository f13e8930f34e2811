"""Sandboxes by Docker, for machines with its daemon. Each command is a container on shared directories.

The next command starts from what the last one left in its container. The commands share the network of a small
container without any, in which network_proxy_main.py opens the listening sockets; we do the forwarding, as with
bubblewrap. A container outlives the `docker` client that started it: each is removed before the next command starts,
the last one with the instance, and those of a killed process by the next one.
"""

import asyncio
import json
import os
import shlex
import shutil
import socket
import stat
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path, PurePosixPath
from typing import ClassVar

from loopwright.execution.base import Command, Completion
from loopwright.execution.files import remove
from loopwright.execution.local.processes import start_ticks
from loopwright.execution.sandbox import network_proxy_main
from loopwright.execution.sandbox.base import (
    NO_MOUNTS,
    STATUS_WRAPPER,
    Bounds,
    ImageStore,
    Sandbox,
    SandboxError,
    SandboxInstance,
)
from loopwright.execution.sandbox.bubblewrap import PREFIX, remove_stale
from loopwright.execution.sandbox.docker_images import DockerImages, client_environment, run_docker
from loopwright.execution.sandbox.network_proxy import NetworkProxy, receive_files
from loopwright.execution.sandbox.seccomp import docker_profile

IMAGE = "python:3.11-slim"
_CHECK_TIMEOUT_S = 10.0
_PROXY_TIMEOUT_S = 30.0
_FILTERS_ALL = 25
"""The version of Docker whose own filter denies what ours does (io_uring, vsock), and allows only what it knows."""
_CLIENT_FAILED = 125
"""The exit code of `docker run` if it created no container, or lost its daemon."""
_MACHINE, _OWNER = "loopwright.machine", "loopwright.owner"
"""Labels that identify the owner of a container."""
_VARIABLES = "/run/loopwright-variables"
_PRIVATE = ("/root", "/tmp", "/dev/shm")  # noqa: S108  These are private directories.

_STATES = "loopwright-state"
"""The repository of images that hold what a command left, for the next one."""
_SYSTEM = ("/usr/", "/etc/", "/bin/", "/sbin/", "/lib/", "/lib64/", "/opt/", "/tests", "/logs", "/solution")
"""Where an agent could keep the tests of its task from running."""
_OWN_FILES = (
    *("/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab"),
    *("/usr/sbin", "/usr/sbin/docker-init", "/sbin/docker-init"),
)
"""Files that Docker itself puts into each container."""

# $0 is the previous container, $1 the image for what it left, $2 the image that it started from. Its client may have
# been killed, which does not end the container.
_CONTINUE = """
docker kill "$0" >/dev/null 2>&1
if docker commit "$0" "$1" >/dev/null 2>&1; then :
elif docker container inspect "$0" >/dev/null 2>&1; then echo "container $0 cannot be saved" >&2; exit 125
else docker tag "$2" "$1" || exit 125
fi
docker rm --force --volumes "$0" >/dev/null 2>&1
[ -z "$(docker ps --quiet --filter "name=^$0\\$")" ] || { echo "container $0 cannot be removed" >&2; exit 125; }
shift 2
exec "$@"
"""


class Docker(Sandbox):
    """Runs commands in containers of an image, which needs Python 3 if they are to reach any URL.

    The image that `open` is given, such as a task's own, needs nothing but a shell.
    """

    images: ClassVar[ImageStore | None] = DockerImages()

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
                'sandbox = "docker" enforces the bounds `memory` and `processes`, but neither `cpu_s` nor `disk`. '
                'Remove these, or use "bwrap".'
            )

    def check(self) -> None:
        self._server_version()

    def _server_version(self) -> int:
        """The daemon's major version."""
        if shutil.which("docker") is None:
            raise SandboxError('sandbox = "docker" needs Docker. Install it (https://docs.docker.com), or use "bwrap".')
        done = run_docker("version", "--format", "{{.Server.Version}}", timeout_s=_CHECK_TIMEOUT_S)
        if done.returncode:
            reason = done.stderr.strip() or "no error message"
            raise SandboxError(
                f'sandbox = "docker": {reason}{"" if reason.endswith((".", "?")) else "."} '
                'Start the daemon (systemctl start docker), set DOCKER_HOST, or use "bwrap".'
            )
        major = done.stdout.partition(".")[0]
        return int(major) if major.isdecimal() else 0

    @asynccontextmanager
    async def open(
        self,
        workspace: Path,
        *,
        allowed_urls: tuple[str, ...] = (),
        mount_at: str | None = None,
        hide: tuple[Path, ...] = (),
        image: str | None = None,
    ) -> AsyncIterator[SandboxInstance]:
        version = await asyncio.to_thread(self._server_version)
        await asyncio.to_thread(remove_stale_containers)
        await asyncio.to_thread(remove_stale)
        proxy = NetworkProxy(allowed_urls)
        instance = _Instance(workspace, mount_at, proxy, self.bounds, self._readable, self._image, hide)
        instance.set_image(image or self._image)
        if version < _FILTERS_ALL:
            instance.use_own_filter()
        try:
            if allowed_urls:
                await proxy.serve(await asyncio.to_thread(instance.open_listeners))
            yield instance
        finally:
            await proxy.close()
            await asyncio.to_thread(instance.close)


class _Instance(SandboxInstance):
    has_own_paths: ClassVar[bool] = True

    def __init__(
        self,
        workspace: Path,
        mount_at: str | None,
        proxy: NetworkProxy,
        bounds: Bounds,
        readable: tuple[Path, ...],
        image: str,
        hide: tuple[Path, ...],
    ) -> None:
        super().__init__(workspace.absolute())
        self._mount_at = mount_at or str(self.workspace)
        self._proxy, self._bounds, self._readable, self._proxy_image = proxy, bounds, readable, image
        self._image = image
        self._states: list[str] = []
        """The images of what commands left."""
        self._inspected, self._changed_system = "", False
        self._mounted: set[str] = set()
        """The directories in containers that mounts made."""
        # What is not below a readable directory is not visible anyway.
        absolute = [path.absolute() for path in hide if path.exists()]
        self._hide = [path for path in absolute if any(path.is_relative_to(directory) for directory in readable)]
        self._scratch = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{_owner()}-"))
        self._private = {name: self._scratch / name.strip("/").replace("/", "-") for name in _PRIVATE}
        for directory in (*self._private.values(), self._scratch / "proxy", self._scratch / "nothing"):
            directory.mkdir()
        self._name = f"loopwright-{uuid.uuid4().hex}"
        self._containers: list[str] = []
        self._proxy_container: socket.socket | None = None
        self._filter: tuple[str, ...] = ()

    def set_image(self, image: str) -> None:
        """Start the first command from this image."""
        self._image = image

    def use_own_filter(self) -> None:
        """Replace the daemon's system-call filter by ours."""
        path = self._write_private("filter.json", [json.dumps(docker_profile())])
        self._filter = (f"--security-opt=seccomp={path}",)

    def path_inside(self, path: Path) -> str:
        return str(PurePosixPath(self._mount_at) / path.absolute().relative_to(self.workspace))

    def url_inside(self, url: str) -> str:
        return self._proxy.url_inside(url)

    def writable_directories(self) -> Mapping[str, Path]:
        return {**super().writable_directories(), **self._private}

    def begin_verification(self) -> None:
        super().begin_verification()
        if self._has_previous:
            # Its client may have been killed, and what still runs in it could change what is inspected next.
            run_docker("kill", self._containers[-1])
            self._inspect_changes()

    def may_link_to(self, inside: PurePosixPath) -> bool:
        # A system that a command changed may contain new links that lead to the tests.
        return not self._changed_system and super().may_link_to(inside)

    def _inspect_changes(self) -> None:
        """Find out whether the last command changed the system, if this is not known."""
        container = self._containers[-1]
        if container == self._inspected or self._changed_system:
            return
        done = run_docker("diff", container)
        paths = [line.partition(" ")[2] for line in done.stdout.splitlines()]
        is_changed = any(path.startswith(_SYSTEM) and path not in {*_OWN_FILES, *self._mounted} for path in paths)
        # Without a container there was no command either; otherwise what cannot be inspected counts as changed.
        failed = done.returncode != 0 and self._id_file(container).exists()
        if failed and run_docker("version").returncode:
            raise SandboxError(f"the docker daemon is gone: {done.stderr.strip()}")
        self._inspected, self._changed_system = container, is_changed or failed

    @property
    def exceeded_limit(self) -> str | None:
        if self._exceeded_limit is None and self._bounds.memory_bytes is not None and self._has_previous:
            state = run_docker("inspect", "--format", "{{.State.OOMKilled}}", self._containers[-1])
            if state.stdout.strip() == "true":
                self._exceeded_limit = f"memory: more than {self._bounds.memory_bytes / 2**20:g} MiB"
        return self._exceeded_limit

    def has_changed_system(self) -> bool:
        return self._changed_system

    @property
    def _has_previous(self) -> bool:
        """Whether a command ran before."""
        return len(self._containers) > bool(self._proxy.ports)

    def setup_failed(self, completion: Completion) -> bool:
        if completion.exit_code != _CLIENT_FAILED:
            return False
        # A command may exit with the same code, but then its container did, too.
        done = run_docker("inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", self._containers[-1])
        return done.stdout.strip() != f"exited {_CLIENT_FAILED}"

    def wrap(
        self, command: Command, mounts: Mapping[str, Path] = NO_MOUNTS, read_only: Mapping[str, Path] = NO_MOUNTS
    ) -> Command:
        self._proxy.is_blocked, self._verifying = self._verifying, False
        continuation: tuple[str, ...] = ()
        if self._has_previous:
            self._inspect_changes()
            state = f"{_STATES}:{_owner()}-{self._containers[-1]}"
            continuation = ("/bin/sh", "-c", _CONTINUE, self._containers[-1], state, self._image)
            self._image = state
            self._states.append(state)
        self._open_up(mounts)
        name = self._new_container()
        environment = {"HOME": _PRIVATE[0], **command.environment}
        # Docker's environment file has one variable per line; the others are read by a shell inside.
        multiline = {key: value for key, value in environment.items() if "\n" in value}
        lines = (f"{key}={value}" for key, value in environment.items() if key not in multiline)
        environment_file = self._write_private(f"{name}.env", lines)
        exports = (f"export {key}={shlex.quote(value)}" for key, value in multiline.items())
        variables = self._write_private(f"{name}.sh", exports)
        writable = {**self._private, self._mount_at: self.workspace, **mounts}
        visible = {str(path): path for path in self._readable}
        visible |= {str(path): self._scratch / "nothing" for path in self._hide}
        visible |= {**read_only, **({_VARIABLES: variables} if multiline else {})}
        targets = [PurePosixPath(target) for target in (*writable, *visible)]
        self._mounted.update(str(path) for target in targets for path in (target, *target.parents))
        argv = (
            *("docker", "run", "--init", "--entrypoint=", "--name", name, "--cidfile", str(self._id_file(name))),
            *self._isolation(),
            *("--network", f"container:{self._containers[0]}" if self._proxy.ports else "none"),
            *(f"--mount=type=bind,source={path},target={inside}" for inside, path in writable.items()),
            *(f"--mount=type=bind,source={path},target={inside},readonly" for inside, path in visible.items()),
            *("--workdir", self.path_inside(command.directory), "--env-file", str(environment_file), self._image),
            *(("/bin/sh", "-c", '. "$0" && exec "$@"', _VARIABLES) if multiline else ()),
            *command.argv,
        )
        outside = ("/bin/sh", "-c", STATUS_WRAPPER, str(environment_file))
        return replace(command, argv=(*outside, *continuation, *argv), environment=client_environment())

    def _open_up(self, mounts: Iterable[str]) -> None:
        """Let a command reach its private directories and mounts, if an earlier one removed the permissions."""
        for directory in self._private.values():
            directory.chmod(stat.S_IMODE(directory.stat().st_mode) | stat.S_IRWXU)
        for mount, (root, directory) in product(map(PurePosixPath, mounts), self._private.items()):
            path = directory
            for part in mount.relative_to(root).parts if mount.is_relative_to(root) else ():
                path /= part
                if path.is_symlink() or not path.is_dir():
                    break
                path.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IRWXU)

    def _id_file(self, name: str) -> Path:
        """The file that exists once this container does."""
        return self._scratch / f"{name}.id"

    def _write_private(self, name: str, lines: Iterable[str]) -> Path:
        """A file that only we and the command can read."""
        path = self._scratch / name
        path.touch(mode=0o600)
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    def open_listeners(self) -> list[socket.socket]:
        """Start the container with the listening sockets, and receive them through a socket in a mounted directory."""
        ports = self._proxy.ports.values()
        directory = self._scratch / "proxy"
        with socket.socket(socket.AF_UNIX) as handover:
            handover.bind(str(directory / network_proxy_main.SOCKET_NAME))
            handover.listen()
            handover.settimeout(_PROXY_TIMEOUT_S)
            done = run_docker(
                *("run", "--detach", "--rm", "--name", self._new_container(), "--network", "none", *self._isolation()),
                *(f"--add-host={port.host}:{port.address}" for port in ports if port.has_name),
                *(f"--mount=type=bind,source={directory},target=/proxy", "--cap-add=NET_BIND_SERVICE"),
                f"--mount=type=bind,source={network_proxy_main.__file__},target=/network_proxy_main.py,readonly",
                *(self._proxy_image, "python3", "-IS", "/network_proxy_main.py", "/proxy", ""),
                *(f"{port.address}:{port.port}" for port in ports),
            )
            if done.returncode:
                raise SandboxError(f"cannot create the network of a docker sandbox: {done.stderr.strip()}")
            try:
                connection, _ = handover.accept()
            except TimeoutError as error:
                raise SandboxError(
                    f"the image {self._proxy_image} did not open its ports; it needs python3."
                ) from error
        # The container, and its network, exist as long as this is open.
        self._proxy_container = connection
        _, files = receive_files(connection, len(ports) + 3)
        for file in files[len(ports) :]:
            os.close(file)
        return [socket.socket(fileno=file) for file in files[: len(ports)]]

    def close(self) -> None:
        """Remove the containers, with what still runs in them."""
        if self._proxy_container is not None:
            self._proxy_container.close()
        try:
            self._exceeded_limit = self.exceeded_limit
            if self._containers:
                run_docker("rm", "--force", "--volumes", *reversed(self._containers))
            if self._states:
                run_docker("rmi", "--force", *self._states)
        finally:
            remove(self._scratch)

    def _new_container(self) -> str:
        self._containers.append(f"{self._name}-{len(self._containers)}")
        return self._containers[-1]

    def _isolation(self) -> Iterator[str]:
        bounds = self._bounds
        yield from (f"--user={os.getuid()}:{os.getgid()}", "--cap-drop=ALL", "--security-opt=no-new-privileges")
        yield from self._filter
        yield from ("--ulimit=core=0", f"--label={_MACHINE}={_machine()}", f"--label={_OWNER}={_owner()}")
        if bounds.processes is not None:
            yield f"--pids-limit={bounds.processes}"
        if bounds.memory_bytes is not None:
            yield from (f"--memory={bounds.memory_bytes}", f"--memory-swap={bounds.memory_bytes}")


@cache
def remove_stale_containers() -> None:
    """Remove the containers and saved states of our processes that were killed; once per process."""
    template = f'{{{{.ID}}}} {{{{.Label "{_OWNER}"}}}}'
    done = run_docker("ps", "--all", "--filter", f"label={_MACHINE}={_machine()}", "--format", template)
    rows = [line.split() for line in done.stdout.splitlines()]
    if stale := [row[0] for row in rows if row[1:] and row[1] != _owner(int(row[1].partition("-")[0]))]:
        run_docker("rm", "--force", "--volumes", *stale)
    mine = ("--filter", f"label={_MACHINE}={_machine()}", "--format", "{{.Repository}}:{{.Tag}}")
    states = [name for name in run_docker("image", "ls", *mine).stdout.split() if name.startswith(f"{_STATES}:")]
    owners = {name: "-".join(name.partition(":")[2].split("-")[:2]) for name in states}
    if stale := [name for name, owner in owners.items() if owner != _owner(int(owner.partition("-")[0]))]:
        run_docker("rmi", "--force", *stale)


def _machine() -> str:
    """This boot of this machine and our process id namespace: other machines may use the same daemon."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{Path('/proc/self/ns/pid').stat().st_ino}"


def _owner(pid: int | None = None) -> str:
    """A process, by default this one."""
    pid = os.getpid() if pid is None else pid
    return f"{pid}-{start_ticks(pid)}"
