"""Which file system a directory is on, and the journal of SQLite that works there."""

import os
from pathlib import Path

MOUNTS = Path("/proc/self/mounts")
_NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "afs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "fuse.sshfs",
    "fuse.ceph",
    "fuse.glusterfs",
)
"""How the names of network file systems begin."""


def file_system(path: Path, mounts: Path | None = None) -> str:
    """The type of the file system of a path that exists, such as `ext4`; empty if it is unknown."""
    place, longest, kind = os.path.realpath(path), -1, ""
    try:
        lines = (mounts or MOUNTS).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        # Spaces inside a name are written as \\040.
        _, point, name, *_ = (word.replace("\\040", " ") for word in line.split(" "))
        if (place == point or place.startswith(f"{point.rstrip('/')}/")) and len(point) >= longest:
            longest, kind = len(point), name
    return kind


def is_network(kind: str) -> bool:
    """Whether files of this file system are shared by machines."""
    return kind.startswith(_NETWORK)


def journal_mode(path: Path) -> str:
    """`WAL`, or `TRUNCATE` where the write-ahead log's shared memory cannot work."""
    return "TRUNCATE" if is_network(file_system(path.parent)) else "WAL"
