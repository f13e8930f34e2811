"""Artifacts: files that an agent left in its workspace, taken home without being led anywhere else."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

from loopwright.execution.sandbox.files import read_inside

_MOST_FILES = 1000
_MOST_SEEN = 20_000
"""Entries that are looked at: a workspace may hold any number of them."""
_DEEPEST = 16


class Artifacts:
    """What is kept of a workspace: plain files whose names match, as long as there is room for them."""

    def __init__(self, patterns: Sequence[str], most_bytes: int) -> None:
        self._patterns, self._room = patterns, most_bytes
        self.kept: dict[str, bytes] = {}
        self.left_off: list[str] = []
        """What matched and was too large, or one too many."""

    def keep(self, workspace: Path) -> None:
        """Read them. Whatever cannot be read is not there: the agent wrote it, and it is the agent's own doing."""
        for name, size in _files(workspace):
            if any(fnmatchcase(name, pattern) for pattern in self._patterns):
                self._take(workspace, name, size)

    def _take(self, workspace: Path, name: str, size: int) -> None:
        full = size > self._room or len(self.kept) >= _MOST_FILES
        try:
            name.encode()  # a name that is no text cannot be asked for
            data = b"" if full else read_inside(workspace, name, self._room + 1)
        except (OSError, UnicodeEncodeError):
            return
        if full or len(data) > self._room:  # it grew
            self.left_off += [name] if len(self.left_off) < _MOST_FILES else []
            return
        self._room -= len(data)
        self.kept[name] = data


def _files(root: Path) -> Iterator[tuple[str, int]]:
    """The files below a directory, in order, with their sizes; links are not followed."""
    waiting, seen = [("", 0)], 0
    while waiting:
        place, depth = waiting.pop()
        try:
            with os.scandir(root / place) as found:
                entries = sorted(islice(found, _MOST_SEEN), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            seen += 1
            if seen > _MOST_SEEN:
                return
            name = f"{place}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                waiting += [(f"{name}/", depth + 1)] if depth < _DEEPEST else []
            elif entry.is_file(follow_symlinks=False):
                with suppress(OSError):  # it is gone
                    yield name, entry.stat(follow_symlinks=False).st_size
