"""Removes the links that an agent left in a sandbox and that lead out of it, before anything reads its files.

A link is followed as the next command would follow it: it may lead to where that command finds its tests.
"""

import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from loopwright.execution.sandbox.base import SandboxInstance
from loopwright.execution.sandbox.files import remove

_MAX_HOPS = 40
"""As in the kernel."""
_TIMEOUT_S = 30.0


class TooManyFiles(Exception):
    """The files of a sandbox could not be inspected in time. Where tests are run, the agent's reward is zero then."""


def remove_outward_links(instance: SandboxInstance) -> list[str]:
    """Remove links in the workspace that leave it, and others that leave the sandbox; their paths inside.

    Links to the system's own files stay: a virtual environment consists of them. Directories that cannot be read, such
    as those with a path that is too long, are removed as well. TooManyFiles after half a minute.
    """
    removed = []
    modes: dict[str, int] = {}
    deadline_s = time.monotonic() + _TIMEOUT_S
    directories = instance.writable_directories()
    try:
        for root, directory in directories.items():
            targets = [root] if directory == instance.workspace else [*directories]
            for path, is_link in _links(directory, modes):
                if time.monotonic() > deadline_s:
                    raise TooManyFiles(f"the agent's files could not be inspected within {_TIMEOUT_S:g} s")
                inside = PurePosixPath(root) / path.relative_to(directory)
                if is_link and _may_stay(instance, inside, targets):
                    continue
                _grant(path.parent, modes)
                path.unlink() if is_link else remove(path)
                removed.append(str(inside))
    finally:
        for folder, mode in reversed(modes.items()):
            with suppress(OSError):
                Path(folder).chmod(mode)
    return removed


def _may_stay(instance: SandboxInstance, link: PurePosixPath, targets: list[str]) -> bool:
    target = resolve(instance, link)
    return target is not None and (instance.may_link_to(target) or any(target.is_relative_to(each) for each in targets))


def resolve(instance: SandboxInstance, inside: PurePosixPath) -> PurePosixPath | None:
    """Where a path inside leads, with all links followed; None if there are too many of them."""
    position, rest, hops = PurePosixPath("/"), list(inside.parts[1:]), 0
    while rest:
        name = rest.pop(0)
        if name == "..":
            position = position.parent
            continue
        outside = instance.path_outside(position / name)
        if outside is None or not outside.is_symlink():
            position /= name
            continue
        hops += 1
        if hops > _MAX_HOPS:
            return None
        target = PurePosixPath(outside.readlink())
        if target.is_absolute():
            position = PurePosixPath("/")
        rest = [*(part for part in target.parts if part != target.root), *rest]
    return position


def _links(root: Path, modes: dict[str, int]) -> Iterator[tuple[Path, bool]]:
    """All links below a directory (True), and the directories in it that cannot be read (False)."""
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            _grant(folder, modes)
            with os.scandir(folder) as entries:
                found = [
                    (Path(entry.path), entry.is_symlink(), entry.is_dir(follow_symlinks=False)) for entry in entries
                ]
        except OSError:
            yield folder, False
            continue
        yield from ((path, True) for path, is_link, _ in found if is_link)
        folders += (path for path, _, is_directory in found if is_directory)


def _grant(folder: Path, modes: dict[str, int]) -> None:
    """Make a directory readable and writable for us, and remember its mode."""
    mode = stat.S_IMODE(folder.lstat().st_mode)
    if mode & stat.S_IRWXU != stat.S_IRWXU and str(folder) not in modes:
        folder.chmod(mode | stat.S_IRWXU)
        modes[str(folder)] = mode
