"""Finds what an agent left to keep its tests from working: pipes without a writer, endless files, and no free inode."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import PurePosixPath

from loopwright.execution.sandbox.base import SandboxInstance

_HUGE_BYTES = 2**30
_HOLES_BYTES = 2**26
"""The least that a sparse file must lack to count: reading it gives zeros that are nowhere on the disk."""
_MAX_TRAPS = 20
_MIN_FREE_FILES = 1000
"""How many files tests must be able to create."""


def find_traps(instance: SandboxInstance, since_ns: int) -> list[str]:
    """Pipes and huge or sparse files that are newer than `since_ns`: what each is, and its path inside."""
    space = os.statvfs(instance.workspace)
    is_full = space.f_favail < min(_MIN_FREE_FILES, space.f_files)  # both are zero where files are not counted
    traps = ["a disk with too many files"] if is_full else []
    for root, directory in instance.writable_directories().items():
        for path, info in _files(str(directory)):
            if info.st_ctime_ns >= since_ns and (kind := _trap_kind(info)):
                traps.append(f"{kind} {PurePosixPath(root) / os.path.relpath(path, directory)}")
                if len(traps) == _MAX_TRAPS:
                    return traps
    return traps


def _trap_kind(info: os.stat_result) -> str:
    if stat.S_ISFIFO(info.st_mode):
        return "the pipe"
    if stat.S_ISREG(info.st_mode):
        if info.st_size - info.st_blocks * 512 >= _HOLES_BYTES:
            return "the sparse file"
        if info.st_size >= _HUGE_BYTES:
            return "the huge file"
    return ""


def _files(root: str) -> Iterator[tuple[str, os.stat_result]]:
    folders = [root]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:  # what we cannot read, tests cannot either
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    with suppress(OSError):
                        yield entry.path, entry.stat(follow_symlinks=False)
