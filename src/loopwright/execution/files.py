"""Reads, measures and removes a directory that an untrusted process wrote to.

Everything in it may be a trap: a link to somebody's keys, a pipe without a writer, a directory without permissions, a
file without end. No path is followed here; each step is taken from the directory before it.
"""

import asyncio
import os
import stat
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_MEASURE_TIMEOUT_S = 30.0
_threads = ThreadPoolExecutor(64, "loopwright-files")
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C"}


def read_inside(root: Path, name: str, limit_bytes: int) -> bytes:
    """The beginning of a file below `root`; FileNotFoundError unless a regular file has this name.

    Links are not followed: what they point to inside the sandbox is something else outside.
    """
    *folders, last = Path(name).parts or ("",)
    if Path(name).is_absolute() or ".." in (*folders, last):
        raise FileNotFoundError(f"{name!r} is not inside {root}")
    directory = os.open(root, _OPEN_FLAGS | os.O_DIRECTORY)
    try:
        for folder in folders:
            inner = _open(folder, os.O_DIRECTORY, directory, root / name)
            os.close(directory)
            directory = inner
        # Non-blocking: opening a named pipe would otherwise wait for a writer.
        fd = _open(last, os.O_NONBLOCK, directory, root / name)
    finally:
        os.close(directory)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FileNotFoundError(f"{root / name} is not a regular file")
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(limit_bytes)
    finally:
        os.close(fd)


def _open(name: str, flags: int, directory: int, path: Path) -> int:
    try:
        return os.open(name, _OPEN_FLAGS | flags, dir_fd=directory)
    except OSError as error:
        raise FileNotFoundError(f"{path} is not a readable regular file: {error.strerror}") from error


def size_bytes(*roots: Path) -> int | None:
    """The disk usage of these directories; None if they cannot be read, or take too long to measure."""
    # An external program: it copes with directories nested thousands of levels deep.
    argv = ("du", "-sxB1", "--", *map(str, roots))
    try:
        done = subprocess.run(argv, capture_output=True, env=_ENVIRONMENT, check=False, timeout=_MEASURE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None
    if b"Permission denied" in done.stderr:
        return None
    return sum(int(line.split()[0]) for line in done.stdout.splitlines())


async def run_in_thread(function: Callable[[Any], T], argument: Any) -> T:
    """Call a function in a separate thread pool, since untrusted files decide how long it takes."""
    return await asyncio.get_running_loop().run_in_executor(_threads, function, argument)


async def remove_in_background(root: Path, wait_s: float = 1.0) -> None:
    """Remove a directory; after `wait_s`, the removal continues in the background."""
    await asyncio.wait({asyncio.ensure_future(run_in_thread(remove, root))}, timeout=wait_s)


def remove(root: Path) -> None:
    """Remove a directory with its contents, regardless of their permissions."""
    # Not by shutil.rmtree, which holds a file descriptor for each level: a deep tree would use up all of them.
    queue, folders = [str(root)], []
    try:
        if root.is_symlink():
            return root.unlink()
        while queue:
            folders.append(queue.pop())
            with os.scandir(folders[-1]) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        queue.append(entry.path)
                    else:
                        os.unlink(entry.path)  # noqa: PTH108  Path costs several times as much.
        for folder in reversed(folders):
            os.rmdir(folder)  # noqa: PTH106
    except OSError:
        for argv in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*argv, "--", root], capture_output=True, env=_ENVIRONMENT, check=False)
