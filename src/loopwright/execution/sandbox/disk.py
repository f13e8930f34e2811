"""The disk bound of a sandbox: the kernel enforces it by a file system of that size, or its files are measured.

A separate file system is a sparse image that root mounts for each sandbox. It counts everything: files that are
deleted but open, mapped, or in transit between two sockets. Elsewhere `du` measures the directories again and again.
"""

import os
import shutil
import stat
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path

from loopwright.execution.files import size_bytes
from loopwright.execution.sandbox.base import SandboxError

POLL_S = 0.2
_TIME_SHARE = 0.05
"""Share of the time that may be spent on measuring a sandbox's disk."""
_BLOCK_BYTES, _INODE_BYTES = 4096, 8192
_OVERHEAD = 1.06
"""Size of a file system over what can be written to it: tables of inodes, and what ext4 keeps for itself."""
_MIN_OVERHEAD_BYTES = 32 << 20
_SLACK_BYTES = 8 << 20
"""What can be written beyond the bound. A disk with less free space counts as full: ext4 refuses a large write that
does not fit as a whole."""
# It is never used again after a crash: neither a journal nor barriers are needed.
_FORMAT = ("-q", "-F", "-m", "0", "-O", "^has_journal,^resize_inode", "-E", "lazy_itable_init=1,nodiscard")
_MOUNT_OPTIONS = "loop,nodev,nosuid,noinit_itable,barrier=0"
_ENVIRONMENT = {"PATH": f"{os.defpath}:/usr/sbin:/sbin", "LC_ALL": "C"}


class Disk(ABC):
    """What the files of a sandbox may take up together. Its methods may take long: call them in a thread."""

    @abstractmethod
    def exceeded(self, pids: Iterable[int]) -> str | None:
        """Whether its files take too much space, in words, if these are its processes."""

    @abstractmethod
    def begin_command(self) -> None:
        """From now on, all files count against the bound."""

    @abstractmethod
    def begin_verification(self) -> None:
        """From now on, only what is added to the files of now counts against the bound."""


class MeasuredDisk(Disk):
    """Directories that are measured. If that takes long, it is done rarely, unless their disk loses too much space."""

    def __init__(self, directories: tuple[Path, ...], limit_bytes: int | None) -> None:
        self._directories, self._limit_bytes = directories, limit_bytes
        self._baseline_bytes: int | None = 0
        """What does not count; None if it could not be measured, and then nothing counts."""
        self._next_s = self._earliest_s = 0.0
        self._alarm_bytes = 0
        """Free space at which it is measured early: less than that, and the bound may be exceeded."""

    def exceeded(self, pids: Iterable[int]) -> str | None:
        limit, start_s = self._limit_bytes, time.monotonic()
        if limit is None or start_s < self._earliest_s:
            return None
        free = free_bytes(*self._directories)
        if start_s < self._next_s and free >= self._alarm_bytes:
            return None
        size = size_bytes(*self._directories)
        size = None if size is None else size + unlinked_bytes(pids)
        end_s = time.monotonic()
        self._earliest_s = end_s + max(POLL_S, end_s - start_s)
        self._next_s = end_s + max(POLL_S, (end_s - start_s) / _TIME_SHARE)
        self._alarm_bytes = free - max(0, limit + (self._baseline_bytes or 0) - (size or 0))
        # Read only now: verification may have begun while the agent's files were measured.
        if (baseline := self._baseline_bytes) is None:
            return None
        if size is None:
            return "disk: its size cannot be measured: an unreadable directory, or too many files"
        return f"disk: {size - baseline} bytes of {limit}" if size - baseline > limit else None

    def begin_command(self) -> None:
        self._baseline_bytes = 0

    def begin_verification(self) -> None:
        self._baseline_bytes = 0 if self._limit_bytes is None else size_bytes(*self._directories)


class SizedDisk(Disk):
    """A mounted file system with room for twice the bound, of which a file of ours takes what must not be used."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path, self._limit_bytes = path, limit_bytes
        self._counts_all: bool | None = None

    @classmethod
    def mount(cls, directory: Path, limit_bytes: int) -> "SizedDisk":
        """Mount a new one below this directory; SandboxError if that fails."""
        image, path = directory / "disk.image", directory / "disk"
        path.mkdir(mode=0o700)
        machine = os.statvfs(directory)
        size = int(2 * limit_bytes * _OVERHEAD) + _MIN_OVERHEAD_BYTES
        size = min(size, machine.f_blocks * machine.f_frsize) // _BLOCK_BYTES * _BLOCK_BYTES
        with image.open("xb") as file:
            image.chmod(0o600)
            for offset, data in _format(size):
                os.pwrite(file.fileno(), data, offset)
            file.truncate(size)
        try:
            _run("mount", "-t", "ext4", "-o", _MOUNT_OPTIONS, str(image), str(path))
        finally:
            image.unlink()  # The mount keeps it, and it is gone with the mount.
        return cls(path, limit_bytes)

    def unmount(self) -> None:
        """Unmount it, also while something still reads from it."""
        _run("umount", "--lazy", str(self.path))
        # This unmounts it in the namespaces of other sandboxes as well, which would keep its space in use.
        self.path.rmdir()

    def exceeded(self, pids: Iterable[int] = ()) -> str | None:
        info = os.statvfs(self.path)
        if info.f_bavail * info.f_frsize >= _SLACK_BYTES and info.f_favail:
            return None
        return f"disk: all of {self._limit_bytes} bytes"

    def begin_command(self) -> None:
        if not self._counts_all:
            self._leave_free(counts_all=True)

    def begin_verification(self) -> None:
        try:
            _run("sync", "--file-system", str(self.path))
        except SandboxError as error:
            # Whether the machine's disk may have been full, or only this one, which is the agent's own fault.
            if free_bytes(self.path.parent) < self._limit_bytes:
                raise SandboxError(f"the machine's disk is full, and what the agent wrote is lost: {error}") from error
        self._leave_free(counts_all=False)

    def _leave_free(self, *, counts_all: bool) -> None:
        """Leave as much space as the bound allows: for all files together, or in addition to those of now."""
        reserve = self.path / "reserve"
        reserve.unlink(missing_ok=True)
        info = os.statvfs(self.path)
        used = info.f_blocks - info.f_bfree if counts_all else 0
        excess = info.f_bavail * info.f_frsize - max(0, self._limit_bytes - used * info.f_frsize) - _SLACK_BYTES
        if excess > 0:
            with reserve.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, excess)
        self._counts_all = counts_all


@cache
def why_not_sized() -> str:
    """Why sandboxes cannot have separate file systems on this machine; empty if they can. It tries one."""
    if os.geteuid():
        return "only root can mount a file system"
    try:
        with tempfile.TemporaryDirectory(prefix="loopwright-disk-") as directory:
            SizedDisk.mount(Path(directory), 1 << 20).unmount()
    except OSError as error:
        return str(error)
    return ""


@lru_cache(maxsize=4)
def _format(size: int) -> tuple[tuple[int, bytes], ...]:
    """An empty file system of this size: the parts of its image that are not zero."""
    with tempfile.TemporaryDirectory(prefix="loopwright-disk-") as directory:
        image = Path(directory, "image")
        with image.open("xb") as file:
            file.truncate(size)
        _run("mkfs.ext4", *_FORMAT, "-b", str(_BLOCK_BYTES), "-i", str(_INODE_BYTES), str(image))
        with image.open("rb") as file:
            return tuple(_parts(file.fileno()))


def _parts(file: int) -> Iterable[tuple[int, bytes]]:
    end = 0
    with suppress(OSError):  # There is no data after the last part.
        while True:
            start = os.lseek(file, end, os.SEEK_DATA)
            end = os.lseek(file, start, os.SEEK_HOLE)
            yield start, os.pread(file, end - start, start)


def _run(program: str, *arguments: str) -> None:
    path = shutil.which(program, path=_ENVIRONMENT["PATH"])
    if path is None:
        raise SandboxError(f"{program} is missing. Run: apt-get install e2fsprogs util-linux")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, env=_ENVIRONMENT, check=False)
    if done.returncode:
        raise SandboxError(f"{program} failed: {done.stderr.strip()}")


def free_bytes(*directories: Path) -> int:
    """The free space on the file systems of these directories."""
    systems = {os.stat(directory).st_dev: os.statvfs(directory) for directory in directories}  # noqa: PTH116  as fast
    return sum(system.f_bavail * system.f_frsize for system in systems.values())


def unlinked_bytes(pids: Iterable[int]) -> int:
    """The disk usage of files without a name that these processes have open or mapped: `du` cannot see them."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        for folder in ("fd", "map_files"):
            with suppress(OSError), os.scandir(f"/proc/{pid}/{folder}") as entries:
                for entry in entries:
                    with suppress(OSError):
                        info = entry.stat()
                        if not info.st_nlink and stat.S_ISREG(info.st_mode) and info.st_dev != _memory_device():
                            sizes[info.st_dev, info.st_ino] = info.st_blocks * 512
    return sum(sizes.values())


@cache
def _memory_device() -> int:
    """The device of files that are memory (memfd), and have no name either."""
    file = os.memfd_create("loopwright")
    try:
        return os.fstat(file).st_dev
    finally:
        os.close(file)
