"""A directory that a foreign process wrote: reading it without being led out of it, measuring it, and removing it.

Everything in it may be a trap: a link to somebody's keys, a pipe that nobody writes to, a directory that may not be
opened, a file without end. No path is followed here; each step is taken from the directory before it.
"""

import os
import shutil
import stat
import subprocess
from pathlib import Path

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
    """What all below these directories takes on the disk; None if somebody forbids to look."""
    # A program of its own: it does not stumble over directories that lie thousands deep in one another.
    argv = ("du", "-sxB1", "--", *map(str, roots))
    done = subprocess.run(argv, capture_output=True, env=_PLAIN, check=False)
    if b"Permission denied" in done.stderr:
        return None
    return sum(int(line.split()[0]) for line in done.stdout.splitlines())


def remove(root: Path) -> None:
    """Remove a directory with all that is in it, also what forbids to be opened or emptied."""
    try:
        shutil.rmtree(root)
    except (OSError, RecursionError):
        for argv in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*argv, "--", root], capture_output=True, env=_PLAIN, check=False)
