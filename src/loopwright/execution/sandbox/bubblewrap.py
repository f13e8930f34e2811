"""Sandboxes by bubblewrap: a bare system to read, private directories to write to, and a network proxy.

Inside there is only what is listed here: the system's programs and our interpreter. The writable directories are in a
scratch directory that lives as long as the instance, so that tests find what the agent left.
"""

import asyncio
import math
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath
from typing import ClassVar

from loopwright.execution.base import Command, Completion
from loopwright.execution.files import remove, run_in_thread
from loopwright.execution.local.processes import start_ticks
from loopwright.execution.sandbox import launcher_main
from loopwright.execution.sandbox.base import (
    NO_MOUNTS,
    STATUS_WRAPPER,
    Bounds,
    Sandbox,
    SandboxError,
    SandboxInstance,
)
from loopwright.execution.sandbox.cgroup import Cgroup, parents
from loopwright.execution.sandbox.disk import Disk, MeasuredDisk, SizedDisk, why_not_sized
from loopwright.execution.sandbox.network_proxy import TOOLS, NetworkProxy, explain, plain_environment
from loopwright.execution.sandbox.resource_monitor import OWN_PROCESSES, MonitoredSandbox, ResourceMonitor
from loopwright.execution.sandbox.seccomp import compile_filter

PREFIX = "loopwright-sandbox-"
_SYSTEM = tuple(
    map(Path, ["/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store"])
)
_KERNEL = ("/proc/sys", "/proc/sysrq-trigger", "/proc/fs", "/proc/scsi", "/proc/acpi")
"""What root could still write to, since the kernel only checks the owner."""
_SHARED = (
    *("/proc/keys", "/proc/key-users", "/proc/kcore", "/proc/kmsg", "/proc/timer_list", "/proc/latency_stats"),
    *("/proc/sched_debug", "/proc/slabinfo", "/proc/vmallocinfo", "/proc/pagetypeinfo"),
    *("/proc/kpagecount", "/proc/kpageflags", "/proc/kpagecgroup"),
)
"""What /proc shows of the whole machine, to root at least."""
_LAUNCHER = (sys.executable, "-IS", launcher_main.__file__)
_OVERLAYS = ("usr", "etc")
_OVERLAY_PATHS = tuple(Path("/", name) for name in _OVERLAYS)
_REPLACES = "user.overlay.opaque"
"""The attribute of a directory that was removed and created again, in a layer that a user namespace mounts."""
_SECRETS_S = 10.0
"""Seconds for which a scan of /etc for secrets is reused."""
_ISOLATION = (
    *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try", "--disable-userns"),
    *("--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv"),
)
_PLAIN_COMMAND = ("bwrap", *_ISOLATION, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--", "true")
"""A command that uses the machine's own system."""

# Runs inside as process 1: when it ends, the kernel ends all other processes before its exit is reported.
_INIT = """
exec 3>&2 2>/dev/null
"$@" 2>&3 3>&-
exit $?
"""


class Bubblewrap(Sandbox):
    """Runs commands under bubblewrap, as any user of a Linux that allows user namespaces."""

    _checked: ClassVar[set[tuple[Path, ...]]] = set()
    """The `readable` directories of sandboxes that passed `check`, whose result does not change."""

    def __init__(self, bounds: Bounds = Bounds(), readable: tuple[Path, ...] = ()) -> None:  # noqa: B008  frozen
        super().__init__(bounds)
        self._readable = (*dict.fromkeys((Path(sys.base_prefix), Path(sys.prefix), *readable)),)
        self._monitor = ResourceMonitor()
        self._disks: dict[Path, SizedDisk] = {}
        """Those of open instances, by the parent directory of the workspace."""

    def check(self) -> None:
        if shutil.which("bwrap") is None:
            raise SandboxError('sandbox = "bwrap" needs bubblewrap. Run: apt-get install bubblewrap')
        if missing_tools := [tool for tool in TOOLS if shutil.which(tool) is None]:
            raise SandboxError(explain(f"{missing_tools[0]} is missing"))
        compile_filter()
        if missing := [path for path in self._readable if not path.exists()]:
            raise SandboxError(f"readable directory {missing[0]} does not exist. Check its path.")
        done = subprocess.run(_PLAIN_COMMAND, capture_output=True, text=True, env=plain_environment(), check=False)
        if "Unknown option" in done.stderr:
            raise SandboxError(f"{done.stderr.strip()}: this bubblewrap is too old. Install version 0.8 or newer.")
        if done.returncode:
            raise SandboxError(explain(done.stderr))

    @asynccontextmanager
    async def disk(self, directory: Path) -> AsyncIterator[Path]:
        limit_bytes = self.bounds.disk_bytes
        if limit_bytes is None or await asyncio.to_thread(lambda: bool(why_not_sized())):
            yield directory
            return
        mounting = asyncio.ensure_future(asyncio.to_thread(SizedDisk.mount, directory, limit_bytes))
        try:
            await asyncio.shield(mounting)
            self._disks[mounting.result().path] = mounting.result()
            yield mounting.result().path
        finally:
            # Also if this was cancelled while the disk was mounted.
            with suppress(OSError):
                disk = await mounting
                self._disks.pop(disk.path, None)
                await asyncio.to_thread(disk.unmount)

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
        if self._readable not in self._checked:
            self.check()
            self._checked.add(self._readable)
        remove_stale()
        proxy = NetworkProxy(allowed_urls)
        async with AsyncExitStack() as stack:
            disk = self._disks.get(workspace.parent)
            scratch = _Scratch.create(proxy.hosts(), hide, None if disk is None else disk.path)
            stack.push_async_callback(run_in_thread, remove, scratch.path)
            stack.push_async_callback(proxy.close)
            await proxy.open(scratch.writable, _OVERLAYS if os.access("/usr", os.W_OK) else ())
            processes = None if self.bounds.processes is None else self.bounds.processes + OWN_PROCESSES
            limits = {"pids": processes, "memory": self.bounds.memory_bytes}
            cgroup = Cgroup.create(scratch.path.name, {kind: limit for kind, limit in limits.items() if limit})
            stack.push_async_callback(cgroup.close)
            used_disk = disk or MeasuredDisk((workspace, scratch.path), self.bounds.disk_bytes)
            await asyncio.to_thread(used_disk.begin_command)
            instance = _Instance(
                workspace, mount_at, proxy, cgroup, scratch, self.bounds, used_disk, self._readable, hide
            )
            self._monitor.add(instance.monitored)
            stack.push_async_callback(self._monitor.remove, instance.monitored)
            yield instance


@dataclass(frozen=True)
class _Scratch:
    """What an instance writes to outside its workspace."""

    path: Path
    """Our files, which commands only read."""
    writable: Path
    """Where everything is that commands write to."""
    private: Mapping[str, Path]
    """Its writable directories: paths inside, and where they are."""
    secrets: tuple[Path, ...]
    """Paths in /etc that must not be readable."""
    own_files: frozenset[str] = frozenset()
    """What we put into the layers over /usr and /etc."""

    @classmethod
    def create(cls, hosts: str, hide: tuple[Path, ...], disk: Path | None = None) -> "_Scratch":
        """With everything that commands write to on a separate disk, if there is one."""
        own = os.getpid()
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{own}-{start_ticks(own)}-"))
        try:
            writable = path if disk is None else Path(tempfile.mkdtemp(dir=disk, prefix="scratch-"))
            return cls._fill(path, writable, hosts, hide)
        except BaseException:
            remove(path)
            raise

    @classmethod
    def _fill(cls, path: Path, writable: Path, hosts: str, hide: tuple[Path, ...]) -> "_Scratch":
        names = (home_inside(), "/tmp", "/var/tmp", "/run", "/dev/shm")  # noqa: S108  These are private directories.
        private = {name: writable / "private" / name.strip("/").replace("/", "-") for name in names}
        for directory in private.values():
            directory.mkdir(parents=True)
        for overlay in _OVERLAYS:
            for part in ("upper", "work", "root"):
                (writable / part / overlay).mkdir(parents=True)
            (writable / "upper" / overlay).chmod(0o755)
        (path / "filter").write_bytes(compile_filter())
        (path / "empty").touch(mode=0o444)
        (path / "nothing").mkdir(mode=0o555)
        secrets = _secrets(int(time.monotonic() / _SECRETS_S))
        # In the layer and not mounted over it: the agent may move files there, and a mount would follow a link.
        for hidden in (*secrets, *(path.absolute() for path in hide if _is_in(path, _OVERLAY_PATHS))):
            target = writable / "upper" / hidden.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch(mode=0o000)
        for file in (path / "hosts", writable / "upper/etc/hosts"):
            file.write_text(hosts)
            file.chmod(0o644)
        return cls(path, writable, private, secrets, frozenset(_changes_in(writable / "upper")))

    def clear_mount_point(self, inside: str) -> None:
        """Remove what the agent left at a mount point: a link there would lead the mount elsewhere."""
        if _is_in(Path(inside), _OVERLAY_PATHS):
            upper = self.writable / "upper" / inside.lstrip("/")
            if any(part.is_symlink() for part in (upper, *upper.parents) if part.is_relative_to(self.writable)):
                raise SandboxError(f"cannot mount {inside}: a command replaced a directory on its path by a link.")
        for name, directory in self.private.items():
            if PurePosixPath(inside).is_relative_to(name):
                for part in PurePosixPath(inside).relative_to(name).parts:
                    directory.chmod(0o700)
                    directory /= part
                    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
                        directory.unlink()
                    directory.mkdir(exist_ok=True)


class _Instance(SandboxInstance):
    has_own_paths: ClassVar[bool] = True

    def __init__(
        self,
        workspace: Path,
        mount_at: str | None,
        proxy: NetworkProxy,
        cgroup: Cgroup,
        scratch: _Scratch,
        bounds: Bounds,
        disk: Disk,
        readable: tuple[Path, ...],
        hide: tuple[Path, ...],
    ) -> None:
        super().__init__(workspace.absolute())
        self._mount_at = mount_at or str(self.workspace)
        self._proxy, self._cgroup, self._scratch, self._bounds = proxy, cgroup, scratch, bounds
        # Without those that are part of another one, or of the system, which is visible anyway.
        paths = sorted({path.absolute() for path in readable if path.exists()})
        self._readable = [path for index, path in enumerate(paths) if not _is_in(path, (*_SYSTEM, *paths[:index]))]
        self._hide = hide
        self._command_count = 0
        self.monitored = MonitoredSandbox(proxy.net, bounds, disk, self._on_exceeded, cgroup)
        fixed = [path for path in _SYSTEM if str(path).strip("/") not in proxy.overlays]
        if _is_in(Path(self._mount_at), fixed) and not Path(self._mount_at).is_dir():
            raise SandboxError(f"cannot mount the workspace at {mount_at}: the system is read-only here. Use /app.")

    @property
    def exceeded_limit(self) -> str | None:
        return self._exceeded_limit or self.monitored.exceeded_memory()

    def _on_exceeded(self, reason: str) -> None:
        self._exceeded_limit = self._exceeded_limit or reason

    def path_inside(self, path: Path) -> str:
        return str(PurePosixPath(self._mount_at) / path.absolute().relative_to(self.workspace))

    def url_inside(self, url: str) -> str:
        return self._proxy.url_inside(url)

    def begin_verification(self) -> None:
        super().begin_verification()
        self.monitored.begin_verification()

    def is_trusted(self, directory: Path) -> bool:
        return _is_in(directory, (*self._readable, *_SYSTEM))

    def writable_directories(self) -> Mapping[str, Path]:
        return {**super().writable_directories(), **self._scratch.private}

    def path_outside(self, inside: PurePosixPath) -> Path | None:
        path = Path(inside)
        # What is trusted is mounted over the private directories, the workspace over both.
        if inside.is_relative_to(self._mount_at) or not self.is_trusted(path):
            return super().path_outside(inside)
        layer = self._scratch.writable / "upper" / path.relative_to("/")
        return layer if layer.is_symlink() or layer.exists() else path

    def wrap(
        self, command: Command, mounts: Mapping[str, Path] = NO_MOUNTS, read_only: Mapping[str, Path] = NO_MOUNTS
    ) -> Command:
        if not self._verifying:
            self.monitored.disk.begin_command()
        self._proxy.is_blocked, self._verifying = self._verifying, False
        self._command_count += 1
        # In a file and not on the command line, which everybody on this machine can read.
        arguments = self._scratch.path / f"arguments-{self._command_count}"
        arguments.touch(mode=0o600)
        words = self._arguments(command, mounts, read_only)
        arguments.write_bytes(b"".join(os.fsencode(word) + b"\0" for word in words))
        launcher = (*_LAUNCHER, str(self._scratch.path / "filter"), "\n".join(self._cgroup.join_files))
        bwrap = (*self._proxy.enter(), "bwrap", "--args", "3", "--")
        inside = ("/bin/sh", "-c", _INIT, "sh", *_prlimit(self._bounds), "env", "--default-signal=TERM", "--")
        # The command's environment is for the inside only: it could make our own tools load its code.
        argv = ("/bin/sh", "-c", STATUS_WRAPPER, str(arguments), *launcher, *bwrap, *inside, *command.argv)
        return replace(command, argv=argv, environment=plain_environment())

    def setup_failed(self, completion: Completion) -> bool:
        status = self._scratch.path / f"arguments-{self._command_count}.status"
        return completion.exit_code is not None and not (status.exists() and b"exit-code" in status.read_bytes())

    def is_ruined(self) -> bool:
        if self._command_count < 2:
            return False
        argv = (*self._proxy.enter(), *_PLAIN_COMMAND)
        return subprocess.run(argv, capture_output=True, env=plain_environment(), check=False).returncode == 0

    def has_changed_system(self) -> bool:
        return any(file not in self._scratch.own_files for file in _changes_in(self._scratch.writable / "upper"))

    def _arguments(self, command: Command, mounts: Mapping[str, Path], read_only: Mapping[str, Path]) -> Iterator[str]:
        yield from (*_ISOLATION, "--uid", str(os.getuid()), "--gid", str(os.getgid()), "--json-status-fd", "4")
        yield from ("--seccomp", str(launcher_main.FILTER_FD))
        yield from self._system_arguments()
        for inside, directory in self._scratch.private.items():
            yield from ("--bind", str(directory), inside)
        yield from ("--symlink", "../run", "/var/run")
        for path in self._readable:
            self._scratch.clear_mount_point(str(path))
            yield from ("--ro-bind", str(path), str(path))
        overlays = tuple(Path("/", name) for name in self._proxy.overlays)
        for path in self._hide:
            if not _is_in(path, overlays) and _is_in(path, (*self._readable, *_SYSTEM)):
                yield from ("--ro-bind", str(self._scratch.path / "nothing"), str(path))
        for inside, path in {self._mount_at: self.workspace, **mounts, **read_only}.items():
            self._scratch.clear_mount_point(inside)
            yield from ("--ro-bind" if inside in read_only else "--bind", str(path), inside)
        yield from ("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", self.path_inside(command.directory))
        environment = {"HOME": home_inside(), **command.environment}
        # Our interpreter is the last resort.
        path_entries, own_bin = environment.get("PATH", os.defpath).split(":"), str(Path(sys.base_prefix) / "bin")
        environment["PATH"] = ":".join(path_entries if own_bin in path_entries else [*path_entries, own_bin])
        for name, value in environment.items():
            yield from ("--setenv", name, value)

    def _system_arguments(self) -> Iterator[str]:
        scratch, overlays = self._scratch.path, self._proxy.overlays
        for path in _SYSTEM:
            name = str(path)
            if path.is_symlink():
                yield from ("--symlink", str(path.readlink()), name)
            elif path.name in overlays:
                yield from ("--bind", str(self._scratch.writable / "root" / path.name), name)
            elif path.exists():
                yield from ("--ro-bind", name, name)
        if "etc" not in overlays:
            for hidden in self._scratch.secrets:
                yield from ("--ro-bind", str(scratch / ("nothing" if hidden.is_dir() else "empty")), str(hidden))
            if Path("/etc/hosts").exists():
                yield from ("--ro-bind", str(scratch / "hosts"), "/etc/hosts")
        yield from ("--proc", "/proc", "--dev", "/dev")
        for name in _KERNEL:
            if Path(name).exists():
                yield from ("--ro-bind", name, name)
        for name in _SHARED:
            if Path(name).exists():
                yield from ("--ro-bind", str(scratch / "empty"), name)


@cache
def home_inside() -> str:
    """The home directory inside: the same path as outside, but empty."""
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        home = "/"
    is_own = home.count("/") > 1 or home == "/root"
    return home if is_own and not _is_in(Path(home), _SYSTEM) else "/home/sandbox"


@lru_cache(maxsize=1)
def _secrets(_moment: int) -> tuple[Path, ...]:
    return tuple(unreadable_paths("/etc"))


def unreadable_paths(directory: str) -> Iterator[Path]:
    """What not every user may read. Inside, root has no privileges but still owns these."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(OSError):
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode):
                    continue
                if not mode & stat.S_IROTH:
                    yield Path(entry.path)
                elif stat.S_ISDIR(mode):
                    yield from unreadable_paths(entry.path)


def _changes_in(layer: Path) -> Iterator[str]:
    """Files, links, marks of removed files, and directories that replace others; Python's caches change nothing."""
    for folder, folders, files in os.walk(layer):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (f"{folder}/{name}" for name in files)
        for path in (f"{folder}/{name}" for name in folders):
            with suppress(OSError):
                if stat.S_ISLNK(os.lstat(path).st_mode) or os.getxattr(path, _REPLACES, follow_symlinks=False):
                    yield path


def _is_in(path: Path, directories: Iterable[Path]) -> bool:
    return any(path.absolute().is_relative_to(directory) for directory in directories)


def _prlimit(bounds: Bounds) -> tuple[str, ...]:
    """The limits that the kernel enforces for each process; the monitor enforces their sum."""
    words = ["prlimit", "--core=0"]
    if bounds.cpu_s is not None:
        words.append(f"--cpu={math.ceil(bounds.cpu_s)}:{math.ceil(bounds.cpu_s) + 1}")
    if bounds.memory_bytes is not None:
        words.append(f"--data={bounds.memory_bytes}")
    if bounds.processes is not None:
        words.append(f"--nproc={bounds.processes}")
    if bounds.disk_bytes is not None:
        words.append(f"--fsize={bounds.disk_bytes}")
    return (*words, "--")


@cache
def remove_stale() -> None:
    """Remove the scratch directories and control groups of our processes that were killed; once per process."""
    groups = ((parent, Path.rmdir) for parent, _ in parents())
    for directory, delete in ((Path(tempfile.gettempdir()), remove), *groups):
        for path in directory.glob(f"{PREFIX}*"):
            with suppress(ValueError, OSError):
                pid, ticks = path.name.removeprefix(PREFIX).split("-")[:2]
                if start_ticks(int(pid)) != int(ticks) and path.stat().st_uid == os.getuid():
                    delete(path)
