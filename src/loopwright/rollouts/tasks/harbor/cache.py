"""Rows of a task directory, kept as Parquet until a file in it changes."""

import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from loopwright.core.lazy import lazy_module
from loopwright.rollouts.tasks.harbor.task import tree

_FORMAT = 1
_KEY = b"loopwright"
_SETTLED_NS = 2_000_000_000
"""A file that was changed so shortly before it was read may change once more within the same tick of its clock."""

Rows = list[dict[str, Any]]


def kept(root: Path, about: str, make: Callable[[], Rows]) -> Rows:
    """The rows that `make` gives, or gave when all files were as they are now."""
    try:
        parquet, arrow = lazy_module("pyarrow.parquet"), lazy_module("pyarrow")
    except ModuleNotFoundError:
        return make()  # the cache is all that needs it
    begun = time.time_ns()
    listing, newest = _listing(root)
    name = blake2b(f"{root.resolve()}\0{about}".encode(), digest_size=16).hexdigest()
    file = directory() / f"{name}.parquet"
    with suppress(OSError, arrow.ArrowException, KeyError, orjson.JSONDecodeError):
        table = parquet.read_table(file)
        if orjson.loads(table.schema.metadata[_KEY]) == {"format": _FORMAT, "listing": listing}:
            return table.to_pylist()  # type: ignore[no-any-return]
    rows = make()
    if newest < begun - _SETTLED_NS and _listing(root)[0] == listing:
        table = arrow.Table.from_pylist(rows)
        metadata = {**(table.schema.metadata or {}), _KEY: orjson.dumps({"format": _FORMAT, "listing": listing})}
        with suppress(OSError):  # a home that cannot be written to costs time, and nothing else
            file.parent.mkdir(parents=True, exist_ok=True)
            write_parquet(table.replace_schema_metadata(metadata), file)
    return rows


def directory() -> Path:
    """Where they are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loopwright" / "tasks"


def write_parquet(table: Any, file: Path) -> None:
    """Write a table so that whoever reads meanwhile sees the old file or the new one."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        lazy_module("pyarrow.parquet").write_table(table, partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _listing(root: Path) -> tuple[str, int]:
    """What the system says about every file, as a hash, and when the last of them was changed."""
    total, newest = blake2b(digest_size=16), 0
    if root.is_dir():
        for name, _, found in tree(root):
            facts: tuple[Any, ...] = (name, found.st_mode, found.st_ino)
            if not stat.S_ISDIR(found.st_mode):
                facts = (*facts, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
                newest = max(newest, found.st_ctime_ns)
            total.update(repr(facts).encode(errors="surrogateescape"))
    return total.hexdigest(), newest
