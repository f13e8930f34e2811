"""A cache of the rows of a task directory, as Parquet, valid until a file in the directory changes."""

import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

import orjson

from loopwright.rollouts.tasks.harbor.task import walk_tree

_FORMAT = 3
_KEY = b"loopwright"
_SETTLE_NS = 2_000_000_000
"""A file that changed this shortly before it was read may change again within the same tick of the file system."""

Rows = list[dict[str, Any]]


def cached_rows(root: Path, variant: str, make: Callable[[], Rows]) -> Rows:
    """The rows that `make` returns, or returned when all files were as they are now."""
    try:
        parquet, arrow = import_module("pyarrow.parquet"), import_module("pyarrow")
    except ModuleNotFoundError:
        return make()  # only the cache needs it
    started_ns = time.time_ns()
    listing, newest_ns = _listing(root)
    name = blake2b(f"{root.resolve()}\0{variant}".encode(), digest_size=16).hexdigest()
    file = directory() / f"{name}.parquet"
    with suppress(OSError, arrow.ArrowException, KeyError, orjson.JSONDecodeError):
        table = parquet.read_table(file)
        if orjson.loads(table.schema.metadata[_KEY]) == {"format": _FORMAT, "listing": listing}:
            return table.to_pylist()  # type: ignore[no-any-return]
    rows = make()
    if newest_ns < started_ns - _SETTLE_NS and _listing(root)[0] == listing:
        table = arrow.Table.from_pylist(rows)
        metadata = {**(table.schema.metadata or {}), _KEY: orjson.dumps({"format": _FORMAT, "listing": listing})}
        with suppress(OSError):  # a read-only cache directory only costs time
            file.parent.mkdir(parents=True, exist_ok=True)
            write_parquet(table.replace_schema_metadata(metadata), file)
    return rows


def directory() -> Path:
    """The directory of the cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loopwright" / "tasks"


def write_parquet(table: Any, file: Path) -> None:
    """Write a table atomically: concurrent readers see the old file or the new one."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        import_module("pyarrow.parquet").write_table(table, partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _listing(root: Path) -> tuple[str, int]:
    """A hash of every file's status, and the time of the last change in nanoseconds."""
    digest, newest_ns = blake2b(digest_size=16), 0
    if root.is_dir():
        for name, _, status in walk_tree(root):
            facts: tuple[Any, ...] = (name, status.st_mode, status.st_ino)
            if not stat.S_ISDIR(status.st_mode):
                facts = (*facts, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                newest_ns = max(newest_ns, status.st_ctime_ns)
            digest.update(repr(facts).encode(errors="surrogateescape"))
    return digest.hexdigest(), newest_ns
