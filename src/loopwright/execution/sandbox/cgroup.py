"""Control groups for a sandbox's processes, where available: the kernel then enforces the limits on their sum.

For processes it matters most to root, whose processes no other limit counts. A memory limit includes what belongs to no
process, such as memfd files. Version 2 groups are created beside our own, if that is delegated to us (systemd does so
below a user's slice); version 1 groups, one for each limit, which need root, inside our own.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_TRIES = 50
_PAUSE_S = 0.02
_V1_FILES = {"pids": "pids.max", "memory": "memory.limit_in_bytes"}
_V2_FILES = {"pids": "pids.max", "memory": "memory.max"}
_EVENTS = ("memory.events", "memory.oom_control")
"""Where the kernel counts the processes that it has ended: in version 2, and in version 1."""
_pending: set[Path] = set()
"""Groups that could not be removed yet because their processes were still running."""


class Cgroup:
    """The control groups of one sandbox; none where none can be created."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths
        """By what they limit."""
        self._kills = 0

    @classmethod
    def create(cls, name: str, limits: Mapping[str, int]) -> "Cgroup":
        """Groups with this name for these limits (`pids`, `memory`), as many of them as possible."""
        for path in (*_pending,):
            _remove(path)
        paths: dict[str, Path] = {}
        for parent, controllers in parents():
            files = _V1_FILES if controllers else _V2_FILES
            kinds = [kind for kind in limits if kind not in paths and (kind in controllers or not controllers)]
            path = parent / name
            with suppress(OSError):
                if kinds:
                    path.mkdir(exist_ok=True)
                paths |= {kind: path for kind in kinds if _set_limit(path / files[kind], limits[kind])}
                if path not in paths.values():
                    path.rmdir()
        return cls(paths)

    @property
    def join_files(self) -> tuple[str, ...]:
        """The files that a process writes its id to in order to join."""
        return tuple(str(path / "cgroup.procs") for path in dict.fromkeys(self._paths.values()))

    def limits(self, kind: str) -> bool:
        """Whether the kernel enforces this limit."""
        return kind in self._paths

    def kills(self) -> int:
        """How many processes the kernel has ended because the memory limit was reached; also after `close`."""
        for name in _EVENTS if "memory" in self._paths else ():
            with suppress(OSError, ValueError):
                words = (self._paths["memory"] / name).read_text().split()
                self._kills = int(words[words.index("oom_kill") + 1])
        return self._kills

    async def close(self) -> None:
        """Remove the groups once their last process is gone; if that takes long, when the next group is created."""
        self.kills()
        _pending.update(self._paths.values())
        for path in {*self._paths.values()}:
            for _ in range(_TRIES):
                if _remove(path):
                    break
                await asyncio.sleep(_PAUSE_S)


def _set_limit(file: Path, limit: int) -> bool:
    try:
        file.write_text(str(limit))
    except OSError:
        return False
    if file.name.startswith("memory"):
        # No swap, and in version 2 the end of all processes together when there is no memory left for one of them.
        options = {"memory.swap.max": 0, "memory.oom.group": 1, "memory.memsw.limit_in_bytes": limit}
        for name, value in options.items():
            with suppress(OSError):
                if (file.parent / name).exists():
                    (file.parent / name).write_text(str(value))
    return True


def _remove(path: Path) -> bool:
    with suppress(OSError):
        path.rmdir()
    if not path.exists():
        _pending.discard(path)
    return path not in _pending


def parents() -> Iterator[tuple[Path, list[str]]]:
    """Where groups could be created, with the names of the limits that are possible there; none for version 2."""
    with suppress(OSError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            names = [name for name in controllers.split(",") if name in _V1_FILES]
            if names:
                yield _ROOT / controllers / path.lstrip("/"), names
            elif not controllers and path != "/":
                # Beside our own and not in it: a group with processes cannot have limited subgroups.
                yield (_ROOT / path.lstrip("/")).parent, []
