"""Directories as bytes, for nodes that do not share a file system with the driver."""

import io
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from loopwright.core.errors import LaunchError

Stamps = Mapping[str, tuple[int, int]]
"""Size and modification time of files, by relative path."""


def stamps(directory: Path) -> Stamps:
    """What a directory contains now."""
    found = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            if path.is_file():
                info = path.stat()
                found[str(path.relative_to(directory))] = info.st_size, info.st_mtime_ns
    return found


def pack(directory: Path, limit_bytes: int, *, before: Stamps | None = None, suffixes: Sequence[str] = ()) -> bytes:
    """The regular files of a directory, links followed, that differ from `before`. LaunchError if they are too large.

    With `suffixes`, only files whose names end so.
    """
    buffer = io.BytesIO()
    total_bytes = 0
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, stamp in sorted(stamps(directory).items()):
            if (before or {}).get(name) == stamp or (suffixes and not name.endswith(tuple(suffixes))):
                continue
            total_bytes += stamp[0]
            if total_bytes > limit_bytes:
                raise LaunchError(
                    f"{directory} has more than {limit_bytes:,} bytes to copy. Raise [system] artifacts, or use an "
                    "--output that all nodes share."
                )
            info = archive.gettarinfo(str((directory / name).resolve()), arcname=name)
            with (directory / name).open("rb") as file:
                archive.addfile(info, file)
    return buffer.getvalue()


def unpack(data: bytes, directory: Path) -> None:
    """Write packed files into a directory, which is created. Links to the driver's inputs are left as they are."""
    directory.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            target = directory / member.name
            if target.is_symlink():
                target.unlink()  # the trial has written its own file there; the input stays as it is
            archive.extract(member, directory, filter="data")
