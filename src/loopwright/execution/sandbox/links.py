"""Removes the links that an agent left in a sandbox and that lead out of it, before anything reads its files.

A link is followed as the next command would follow it: it may lead to where that command finds its tests.
"""

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from loopwright.execution.files import remove
from loopwright.execution.sandbox.base import SandboxInstance

_MAX_HOPS = 40
"""As in the kernel."""
_TIMEOUT_S = 30.0
_UNSEARCHABLE = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM)
"""Errors that an agent can cause; others are the machine's."""


class UncheckedLinks(Exception):
    """Links out of a sandbox may remain in it. Where tests are run, the agent's reward is zero then."""


def remove_outward_links(instance: SandboxInstance) -> list[str]:
    """Remove links in the workspace that leave it, and others that leave the sandbox; their paths inside.

    Links to the system's own files stay: a virtual environment consists of them. A directory that cannot be searched,
    because its path is too long, is removed with the topmost one that it is in. UncheckedLinks after half a minute.
    """
    removed = []
    modes: dict[str, int] = {}
    deadline_s = time.monotonic() + _TIMEOUT_S
    directories = instance.writable_directories()
    try:
        for root, directory in directories.items():
            targets = [root] if directory == instance.workspace else [*directories]
            for path, is_link in _links(directory, modes, deadline_s):
                inside = PurePosixPath(root) / path.relative_to(directory)
                target = resolve(instance, inside) if is_link else None
                if target is not None and (instance.may_link_to(target) or any(map(target.is_relative_to, targets))):
                    continue
                _discard(path, directory, modes, is_link=is_link)
                removed.append(str(inside))
    finally:
        for folder, mode in reversed(modes.items()):
            with suppress(OSError):
                Path(folder).chmod(mode)
    return removed


def _discard(path: Path, directory: Path, modes: dict[str, int], *, is_link: bool) -> None:
    """Remove a link, or all that is in the same entry of `directory`."""
    if is_link:
        with suppress(OSError):
            _grant(path.parent, modes)
            path.unlink()
            return
    entry = directory / path.relative_to(directory).parts[0]
    remove(entry)
    if os.path.lexists(entry):
        raise UncheckedLinks(f"the agent left files below {entry.name} that can be neither inspected nor removed")


def resolve(instance: SandboxInstance, inside: PurePosixPath) -> PurePosixPath | None:
    """Where a path inside leads, with all links followed; None if that cannot be found out."""
    position, rest, hops = PurePosixPath("/"), list(inside.parts[1:]), 0
    while rest:
        name = rest.pop(0)
        if name == "..":
            position = position.parent
            continue
        outside = instance.path_outside(position / name)
        try:
            if outside is None or not outside.is_symlink():
                position /= name
                continue
            target = PurePosixPath(outside.readlink())
        except OSError:  # its path is too long outside, but perhaps not inside
            return None
        hops += 1
        if hops > _MAX_HOPS:
            return None
        if target.is_absolute():
            position = PurePosixPath("/")
        rest = [*(part for part in target.parts if part != target.root), *rest]
    return position


def _links(root: Path, modes: dict[str, int], deadline_s: float) -> Iterator[tuple[Path, bool]]:
    """All links below a directory (True), and the directories in it that cannot be searched (False)."""
    folders = [str(root)]
    while folders:
        folder, links = folders.pop(), []
        try:
            _grant(Path(folder), modes)
            with os.scandir(folder) as entries:
                for entry in entries:
                    if time.monotonic() > deadline_s:
                        raise UncheckedLinks(f"the agent's files could not be inspected within {_TIMEOUT_S:g} s")
                    if entry.is_symlink():
                        links.append(entry.path)
                    elif entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except FileNotFoundError:  # removed meanwhile, with what it was in
            continue
        except OSError as error:
            if error.errno not in _UNSEARCHABLE:
                raise
            yield Path(folder), False
        yield from ((Path(link), True) for link in links)


def _grant(folder: Path, modes: dict[str, int]) -> None:
    """Make a directory readable and writable for us, and remember its mode."""
    mode = stat.S_IMODE(folder.lstat().st_mode)
    if mode & stat.S_IRWXU != stat.S_IRWXU and str(folder) not in modes:
        folder.chmod(mode | stat.S_IRWXU)
        modes[str(folder)] = mode
