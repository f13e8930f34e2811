"""Artifacts: files that an agent left in its workspace, collected without following links."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

from loopwright.execution.files import read_inside

_MAX_FILES = 1000
_MAX_ENTRIES = 20_000
"""Directory entries that are examined: a workspace may contain any number of them."""
_MAX_DEPTH = 16


class Artifacts:
    """Files of a workspace whose names match, up to a total size."""

    def __init__(self, patterns: Sequence[str], max_bytes: int) -> None:
        self._patterns, self._bytes_left = patterns, max_bytes
        self.files: dict[str, bytes] = {}
        self.left_off: list[str] = []
        """Files that matched but exceeded the total size or the number of files."""

    def collect(self, workspace: Path) -> None:
        """Read the files. Those that cannot be read are skipped: the agent created them that way."""
        for name, size in _files(workspace):
            if any(fnmatchcase(name, pattern) for pattern in self._patterns):
                self._read(workspace, name, size)

    def _read(self, workspace: Path, name: str, size: int) -> None:
        full = size > self._bytes_left or len(self.files) >= _MAX_FILES
        try:
            name.encode()  # a file whose name is not text cannot be requested
            data = b"" if full else read_inside(workspace, name, self._bytes_left + 1)
        except (OSError, UnicodeEncodeError):
            return
        if full or len(data) > self._bytes_left:  # it may have grown since its size was read
            self.left_off += [name] if len(self.left_off) < _MAX_FILES else []
            return
        self._bytes_left -= len(data)
        self.files[name] = data


def _files(root: Path) -> Iterator[tuple[str, int]]:
    """The files below a directory, in order, with their sizes; links are not followed."""
    pending, count = [("", 0)], 0
    while pending:
        parent, depth = pending.pop()
        try:
            with os.scandir(root / parent) as listing:
                entries = sorted(islice(listing, _MAX_ENTRIES), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            count += 1
            if count > _MAX_ENTRIES:
                return
            name = f"{parent}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                pending += [(f"{name}/", depth + 1)] if depth < _MAX_DEPTH else []
            elif entry.is_file(follow_symlinks=False):
                with suppress(OSError):  # it is gone
                    yield name, entry.stat(follow_symlinks=False).st_size
