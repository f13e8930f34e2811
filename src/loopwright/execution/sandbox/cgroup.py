"""A control group for a sandbox's processes, where available: the kernel then enforces the number of processes.

It matters most for root, whose processes no other limit counts. Version 2 groups are created beside our own, if that
is delegated to us (systemd does so below a user's slice); version 1 groups, which need root, inside our own.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_TRIES = 50
_PAUSE_S = 0.02
_pending: set[Path] = set()
"""Groups that could not be removed yet because their processes were still running."""


class Cgroup:
    """One control group, or nothing where none can be created."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @classmethod
    def create(cls, name: str, max_processes: int) -> "Cgroup":
        """A group with this name and process limit."""
        for path in (*_pending,):
            _remove(path)
        for parent in parents():
            path = parent / name
            with suppress(OSError):
                path.mkdir()
                try:
                    (path / "pids.max").write_text(str(max_processes))
                except OSError:
                    path.rmdir()
                    raise
                return cls(path)
        return cls(None)

    @property
    def join_file(self) -> str:
        """The file that a process writes its id to in order to join; empty without a group."""
        return str(self._path / "cgroup.procs") if self._path else ""

    async def close(self) -> None:
        """Remove the group once its last process is gone; if that takes long, when the next group is created."""
        if self._path is None:
            return
        _pending.add(self._path)
        for _ in range(_TRIES):
            if _remove(self._path):
                return
            await asyncio.sleep(_PAUSE_S)


def _remove(path: Path) -> bool:
    with suppress(OSError):
        path.rmdir()
    if not path.exists():
        _pending.discard(path)
    return path not in _pending


def parents() -> Iterator[Path]:
    """Where a group that limits processes could be created."""
    with suppress(OSError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "pids" in controllers.split(","):
                yield _ROOT / "pids" / path.lstrip("/")
            elif not controllers and path != "/":
                # Beside our own and not in it: a group with processes cannot have limited subgroups.
                yield (_ROOT / path.lstrip("/")).parent
