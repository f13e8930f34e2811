"""Rooms by bubblewrap: a bare system to read, places of its own to write to, and no network but the doors of its gate.

What is not named here is not there: the root holds the system's programs, our own interpreter, and nothing else. Its
writable places lie in a scratch directory that lives as long as the room, so that tests find what the agent left.
"""

import math
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath
from typing import ClassVar

from loopwright.execution.base import Command, Completion
from loopwright.execution.local.processes import start_ticks
from loopwright.execution.sandbox.base import NO_MOUNTS, Bounds, Sandbox, SandboxError, SandboxInstance
from loopwright.execution.sandbox.cgroup import Cgroup, parents
from loopwright.execution.sandbox.files import remove, run_in_thread
from loopwright.execution.sandbox.network_proxy import TOOLS, NetworkProxy, explain, plain_environment
from loopwright.execution.sandbox.resource_monitor import OWN_PROCESSES, MonitoredSandbox, ResourceMonitor
from loopwright.execution.sandbox.status import TRUE_STATUS

_SYSTEM = ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
_KERNEL = ("/proc/sys", "/proc/sysrq-trigger", "/proc/fs", "/proc/scsi", "/proc/acpi")
"""What root might still write to, for the kernel asks only who owns it."""
_LAYERED = ("usr", "etc")
_PREFIX = "loopwright-room-"
_SECRETS_S = 10.0
"""Seconds for which what was found in /etc is taken to be still so."""
_ISOLATION = (
    *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try", "--disable-userns"),
    *("--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--hostname", "room", "--clearenv"),
)

# Inside, as process 1: when it ends, the kernel ends all others of the room before anybody is told.
_INSIDE = """
exec 3>&2 2>/dev/null
"$@" 2>&3 3>&-
exit $?
"""


class Bubblewrap(Sandbox):
    """Makes rooms by bubblewrap, for any user of a Linux that allows user namespaces."""

    def __init__(self, bounds: Bounds = Bounds(), readable: tuple[Path, ...] = ()) -> None:  # noqa: B008  frozen
        super().__init__(bounds)
        self._readable = (*dict.fromkeys((Path(sys.base_prefix), Path(sys.prefix), *readable)),)
        self._watch = ResourceMonitor()

    def check(self) -> None:
        """See `Sandbox.check`."""
        if shutil.which("bwrap") is None:
            raise SandboxError('sandbox = "bwrap" needs bubblewrap. Run: apt-get install bubblewrap')
        if missing_tool := [tool for tool in TOOLS if shutil.which(tool) is None]:
            raise SandboxError(explain(f"there is no {missing_tool[0]}"))
        if missing := [path for path in self._readable if not path.exists()]:
            raise SandboxError(f"{missing[0]} is to be readable in rooms, but it does not exist. Check its path.")
        argv = ("bwrap", *_ISOLATION, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--", "true")
        done = subprocess.run(argv, capture_output=True, text=True, env=plain_environment(), check=False)
        if "Unknown option" in done.stderr:
            raise SandboxError(f"{done.stderr.strip()}: this bubblewrap is too old. Install version 0.8 or newer.")
        if done.returncode:
            raise SandboxError(explain(done.stderr))

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
        _checked(self)
        remove_stale()
        gate = NetworkProxy(allowed_urls)
        async with AsyncExitStack() as stack:
            scratch = _Scratch.make(gate.hosts(), hide)
            stack.push_async_callback(run_in_thread, remove, scratch.path)
            stack.push_async_callback(gate.close)
            await gate.open(scratch.path, _LAYERED if os.access("/usr", os.W_OK) else ())
            group = Cgroup(None)
            if self.bounds.processes is not None:
                group = Cgroup.make(scratch.path.name, self.bounds.processes + OWN_PROCESSES)
                stack.push_async_callback(group.close)
            room = _Instance(workspace, mount_at, gate, group, scratch, self.bounds, (*_visible(self._readable),), hide)
            self._watch.add(room.watched)
            stack.push_async_callback(self._watch.drop, room.watched)
            yield room


@dataclass(frozen=True)
class _Scratch:
    """What a room writes to, outside its workspace."""

    path: Path
    private: Mapping[str, Path]
    """Its writable places: what they are called inside, and where they are."""
    secrets: tuple[Path, ...]
    """What is not to be seen in /etc."""

    @classmethod
    def make(cls, hosts: str, hide: tuple[Path, ...]) -> "_Scratch":
        own = os.getpid()
        path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{own}-{start_ticks(own)}-"))
        try:
            return cls._filled(path, hosts, hide)
        except BaseException:
            remove(path)
            raise

    @classmethod
    def _filled(cls, path: Path, hosts: str, hide: tuple[Path, ...]) -> "_Scratch":
        private = {name: path / "private" / name.strip("/").replace("/", "-") for name in _private()}
        for place in private.values():
            place.mkdir(parents=True)
        for layered in _LAYERED:
            for part in ("upper", "work", "root"):
                (path / part / layered).mkdir(parents=True)
            (path / "upper" / layered).chmod(0o755)
        (path / "empty").touch(mode=0o444)
        (path / "nothing").mkdir(mode=0o555)
        secrets = _secrets(int(time.monotonic() / _SECRETS_S))
        # Into the layer rather than over it: the agent may move things in there, and a mount would follow a link.
        for hidden in (*secrets, *(path.absolute() for path in hide if _lies_in(path, _layered()))):
            place = path / "upper" / hidden.relative_to("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch(mode=0o000)
        for file in (path / "hosts", path / "upper/etc/hosts"):
            file.write_text(hosts)
            file.chmod(0o644)
        return cls(path, private, secrets)

    def clear(self, inside: str) -> None:
        """Make way for a mount: a link that the agent put in its place must not lead it astray."""
        if _lies_in(Path(inside), _layered()):
            upper = self.path / "upper" / inside.lstrip("/")
            if any(place.is_symlink() for place in (upper, *upper.parents) if place.is_relative_to(self.path)):
                raise SandboxError(f"somebody put a link in the way to {inside}, where the room is to mount something.")
        for name, place in self.private.items():
            if PurePosixPath(inside).is_relative_to(name):
                for part in PurePosixPath(inside).relative_to(name).parts:
                    place.chmod(0o700)
                    place /= part
                    if place.is_symlink() or (place.exists() and not place.is_dir()):
                        place.unlink()
                    place.mkdir(exist_ok=True)


class _Instance(SandboxInstance):
    has_own_paths: ClassVar[bool] = True

    def __init__(
        self,
        workspace: Path,
        mount_at: str | None,
        gate: NetworkProxy,
        group: Cgroup,
        scratch: _Scratch,
        bounds: Bounds,
        readable: tuple[Path, ...],
        hide: tuple[Path, ...],
    ) -> None:
        super().__init__(workspace.absolute())
        self._at = mount_at or str(self.workspace)
        self._gate, self._group, self._scratch, self._bounds = gate, group, scratch, bounds
        self._readable, self._hide = readable, hide
        self._commands = 0
        self.watched = MonitoredSandbox(gate.net, bounds, (workspace, scratch.path), self.break_)
        if _lies_in(Path(self._at), _fixed(gate.laid)) and not Path(self._at).is_dir():
            raise SandboxError(f"the workspace cannot be {mount_at} here, where the system is read-only. Choose /app.")

    def break_(self, reason: str) -> None:
        """Take note of a bound that was broken."""
        self.exceeded_limit = self.exceeded_limit or reason

    def path_inside(self, path: Path) -> str:
        """See `SandboxInstance.path_inside`."""
        return str(PurePosixPath(self._at) / path.absolute().relative_to(self.workspace))

    def url_inside(self, url: str) -> str:
        """See `SandboxInstance.url_inside`."""
        return self._gate.url_inside(url)

    def begin_verification(self) -> None:
        """See `SandboxInstance.begin_verification`."""
        super().begin_verification()
        self.watched.spare()

    def is_trusted(self, directory: Path) -> bool:
        """See `SandboxInstance.is_trusted`."""
        return _lies_in(directory, (*self._readable, *map(Path, _SYSTEM)))

    def wrap(
        self, command: Command, mounts: Mapping[str, Path] = NO_MOUNTS, fixed: Mapping[str, Path] = NO_MOUNTS
    ) -> Command:
        """See `SandboxInstance.wrap`."""
        if not self._settled:
            self.watched.spared_bytes = 0
        self._gate.shut, self._settled = self._settled, False
        self._commands += 1
        # In a file, and not on the command line, which everybody on this machine may read.
        arguments = self._scratch.path / f"arguments-{self._commands}"
        arguments.touch(mode=0o600)
        arguments.write_bytes(b"".join(os.fsencode(word) + b"\0" for word in self._arguments(command, mounts, fixed)))
        outside = ("/bin/sh", "-c", TRUE_STATUS, str(arguments), *self._gate.enter(), "bwrap", "--args", "3", "--")
        inside = ("/bin/sh", "-c", _INSIDE, "sh", *_limits(self._bounds), "env", "--default-signal=TERM", "--")
        # The command's own environment is for the inside alone: it could make our own tools load its code.
        environment = {**plain_environment(), "LOOPWRIGHT_GROUP": self._group.entry}
        return replace(command, argv=(*outside, *inside, *command.argv), environment=environment)

    def setup_failed(self, completion: Completion) -> bool:
        """See `SandboxInstance.setup_failed`."""
        status = self._scratch.path / f"arguments-{self._commands}.status"
        return completion.exit_code is not None and not (status.exists() and b"exit-code" in status.read_bytes())

    def _arguments(self, command: Command, mounts: Mapping[str, Path], fixed: Mapping[str, Path]) -> Iterator[str]:
        yield from (*_ISOLATION, "--uid", str(os.getuid()), "--gid", str(os.getgid()), "--json-status-fd", "4")
        yield from self._system()
        for inside, place in self._scratch.private.items():
            yield from ("--bind", str(place), inside)
        yield from ("--symlink", "../run", "/var/run")
        for path in self._readable:
            self._scratch.clear(str(path))
            yield from ("--ro-bind", str(path), str(path))
        for path in self._hide:
            layered = tuple(Path("/", name) for name in self._gate.laid)
            if not _lies_in(path, layered) and _lies_in(path, (*self._readable, *map(Path, _SYSTEM))):
                yield from ("--ro-bind", str(self._scratch.path / "nothing"), str(path))
        for inside, path in {self._at: self.workspace, **mounts, **fixed}.items():
            self._scratch.clear(inside)
            yield from ("--ro-bind" if inside in fixed else "--bind", str(path), inside)
        yield from ("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", self.path_inside(command.directory))
        for name, value in _environment(command.environment).items():
            yield from ("--setenv", name, value)

    def _system(self) -> Iterator[str]:
        scratch, laid = self._scratch.path, self._gate.laid
        for name in _SYSTEM:
            path = Path(name)
            if path.is_symlink():
                yield from ("--symlink", str(path.readlink()), name)
            elif path.name in laid:
                yield from ("--bind", str(scratch / "root" / path.name), name)
            elif path.exists():
                yield from ("--ro-bind", name, name)
        if "etc" not in laid:
            for hidden in self._scratch.secrets:
                yield from ("--ro-bind", str(scratch / ("nothing" if hidden.is_dir() else "empty")), str(hidden))
            if Path("/etc/hosts").exists():
                yield from ("--ro-bind", str(scratch / "hosts"), "/etc/hosts")
        yield from ("--proc", "/proc", "--dev", "/dev")
        for name in _KERNEL:
            if Path(name).exists():
                yield from ("--ro-bind", name, name)


def _layered() -> tuple[Path, ...]:
    return tuple(Path("/", name) for name in _LAYERED)


def _private() -> tuple[str, ...]:
    """The places that each room has for itself."""
    return (_home(), "/tmp", "/var/tmp", "/run", "/dev/shm")  # noqa: S108  These are the room's own.


@cache
def _home() -> str:
    """The home directory: called as outside, and empty."""
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        home = "/"
    own = home.count("/") > 1 or home == "/root"
    return home if own and not _lies_in(Path(home), tuple(map(Path, _SYSTEM))) else "/home/room"


@lru_cache(maxsize=1)
def _secrets(_moment: int) -> tuple[Path, ...]:
    """What in /etc is not for everybody, at this moment."""
    return tuple(_unreadable("/etc"))


def _unreadable(place: str) -> Iterator[Path]:
    """What is not for everybody. Root is no longer root inside, but still the owner of these."""
    with suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            with suppress(OSError):
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode):
                    continue
                if not mode & stat.S_IROTH:
                    yield Path(entry.path)
                elif stat.S_ISDIR(mode):
                    yield from _unreadable(entry.path)


def _visible(readable: tuple[Path, ...]) -> Iterator[Path]:
    """Those that are not part of another one, or of the system, which is visible anyhow."""
    paths = sorted({path.absolute() for path in readable if path.exists()})
    for number, path in enumerate(paths):
        if not _lies_in(path, (*map(Path, _SYSTEM), *paths[:number])):
            yield path


def _fixed(laid: tuple[str, ...]) -> tuple[Path, ...]:
    """The part of the system that no layer lies over."""
    return tuple(Path(name) for name in _SYSTEM if name.strip("/") not in laid)


def _lies_in(path: Path, places: tuple[Path, ...]) -> bool:
    return any(path.absolute().is_relative_to(place) for place in places)


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """The command's own, with the room's home, and our interpreter as the last resort."""
    resort = f"{Path(sys.base_prefix) / 'bin'}"
    path = given.get("PATH", os.defpath).split(":")
    return {"HOME": _home(), **given, "PATH": ":".join(path if resort in path else [*path, resort])}


def _limits(bounds: Bounds) -> tuple[str, ...]:
    """What the kernel sees to by itself, for each process; the watch sees to their sum."""
    limits = ["prlimit", "--core=0"]
    if bounds.cpu_s is not None:
        limits.append(f"--cpu={math.ceil(bounds.cpu_s)}:{math.ceil(bounds.cpu_s) + 1}")
    if bounds.memory_bytes is not None:
        limits.append(f"--data={bounds.memory_bytes}")
    if bounds.processes is not None:
        limits.append(f"--nproc={bounds.processes}")
    if bounds.disk_bytes is not None:
        limits.append(f"--fsize={bounds.disk_bytes}")
    return (*limits, "--")


_checks: set[tuple[Path, ...]] = set()


def _checked(sandbox: Bubblewrap) -> None:
    """Once is enough: what it looks at does not change."""
    if sandbox._readable not in _checks:
        sandbox.check()
        _checks.add(sandbox._readable)


@cache
def remove_stale() -> None:
    """Remove what a killed process of ours left, directories and control groups; once."""
    for place, end in ((Path(tempfile.gettempdir()), remove), *((parent, Path.rmdir) for parent in parents())):
        for path in place.glob(f"{_PREFIX}*"):
            with suppress(ValueError, OSError):
                pid, ticks = path.name.removeprefix(_PREFIX).split("-")[:2]
                if start_ticks(int(pid)) != int(ticks) and path.stat().st_uid == os.getuid():
                    end(path)
