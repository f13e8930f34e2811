"""A directory that a foreign process wrote: reading it without being led out of it, measuring it, and removing it.

Everything in it may be a trap: a link to somebody's keys, a pipe that nobody writes to, a directory that may not be
opened, a file without end. No path is followed here; each step is taken from the directory before it.
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
_MEASURED_WITHIN_S = 30.0
_threads = ThreadPoolExecutor(64, "loopwright-files")
_STEP = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_PLAIN = {"PATH": os.defpath, "LC_ALL": "C"}


def read_inside(root: Path, name: str, limit_bytes: int) -> bytes:
    """The beginning of a file below `root`; FileNotFoundError if there is no plain file of this name.

    Links are not followed, wherever they point: what they point to inside, the agent sees and we do not.
    """
    *folders, last = Path(name).parts or ("",)
    if Path(name).is_absolute() or ".." in (*folders, last):
        raise FileNotFoundError(f"{name!r} does not lie in {root}")
    place = os.open(root, _STEP | os.O_DIRECTORY)
    try:
        for folder in folders:
            inner = _open(folder, os.O_DIRECTORY, place, root / name)
            os.close(place)
            place = inner
        # Without waiting: a named pipe would otherwise hold us until somebody writes to it.
        file = _open(last, os.O_NONBLOCK, place, root / name)
    finally:
        os.close(place)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise FileNotFoundError(f"{root / name} is no plain file")
        with os.fdopen(file, "rb", closefd=False) as opened:
            return opened.read(limit_bytes)
    finally:
        os.close(file)


def _open(name: str, flags: int, place: int, path: Path) -> int:
    try:
        return os.open(name, _STEP | flags, dir_fd=place)
    except OSError as error:
        raise FileNotFoundError(f"{path} is no plain file that can be read: {error.strerror}") from error


def size_bytes(*roots: Path) -> int | None:
    """What all below these directories takes on the disk; None if somebody forbids to look, or it is without end."""
    # A program of its own: it does not stumble over directories that lie thousands deep in one another.
    argv = ("du", "-sxB1", "--", *map(str, roots))
    try:
        done = subprocess.run(argv, capture_output=True, env=_PLAIN, check=False, timeout=_MEASURED_WITHIN_S)
    except subprocess.TimeoutExpired:
        return None
    if b"Permission denied" in done.stderr:
        return None
    return sum(int(line.split()[0]) for line in done.stdout.splitlines())


async def run_in_thread(work: Callable[[Any], T], what: Any) -> T:
    """Do this in a thread that is for such work alone: how long it takes is for strangers to decide."""
    return await asyncio.get_running_loop().run_in_executor(_threads, work, what)


async def remove_in_background(root: Path, within_s: float = 1.0) -> None:
    """Remove a directory; if that takes longer, it goes on while the caller does."""
    await asyncio.wait({asyncio.ensure_future(run_in_thread(remove, root))}, timeout=within_s)


def remove(root: Path) -> None:
    """Remove a directory with all that is in it, also what forbids to be opened or emptied."""
    # Not by shutil.rmtree, which has a file open for each level: a thousand deep, and we could open no other one.
    waiting, folders = [str(root)], []
    try:
        if root.is_symlink():
            return root.unlink()
        while waiting:
            folders.append(waiting.pop())
            with os.scandir(folders[-1]) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        os.unlink(entry.path)  # noqa: PTH108  Path costs several times as much.
        for folder in reversed(folders):
            os.rmdir(folder)  # noqa: PTH106
    except OSError:
        for argv in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*argv, "--", root], capture_output=True, env=_PLAIN, check=False)
