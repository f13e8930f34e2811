"""A control group for a room's processes, where we may have one: then the kernel itself refuses one process too many.

It matters most for root, whose processes no other limit counts. Version 2 groups are made beside our own, where
somebody delegated that to us (systemd does, below a user's slice); version 1 groups, which only root can have, inside.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_TRIES = 50
_PAUSE_S = 0.02
_left: set[Path] = set()
"""Groups whose processes would not go."""


class Cgroup:
    """One group, or none where there can be none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @classmethod
    def make(cls, name: str, processes: int) -> "Cgroup":
        """A group of this name for so many processes."""
        for path in (*_left,):
            _remove(path)
        for parent in parents():
            path = parent / name
            with suppress(OSError):
                path.mkdir()
                try:
                    (path / "pids.max").write_text(str(processes))
                except OSError:
                    path.rmdir()
                    raise
                return cls(path)
        return cls(None)

    @property
    def entry(self) -> str:
        """The file that a process writes its id to in order to join; empty where there is none."""
        return str(self._path / "cgroup.procs") if self._path else ""

    async def close(self) -> None:
        """Remove it, once the last of its processes is gone; if that takes long, some time later."""
        if self._path is None:
            return
        _left.add(self._path)
        for _ in range(_TRIES):
            if _remove(self._path):
                return
            await asyncio.sleep(_PAUSE_S)


def _remove(path: Path) -> bool:
    with suppress(OSError):
        path.rmdir()
    if not path.exists():
        _left.discard(path)
    return path not in _left


def _own_groups() -> str:
    return Path("/proc/self/cgroup").read_text()


def parents() -> Iterator[Path]:
    """Where a group that counts processes could be made."""
    with suppress(OSError):
        for line in _own_groups().splitlines():
            _, controllers, place = line.split(":", 2)
            if "pids" in controllers.split(","):
                yield _ROOT / "pids" / place.lstrip("/")
            elif not controllers and place != "/":
                # Beside our own and not in it: a group that has processes cannot have groups that are counted.
                yield (_ROOT / place.lstrip("/")).parent
