"""The processes that this one has begun and not yet buried: Ray's too, where an earlier test has started it."""

from pathlib import Path


def children() -> set[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for found in lists for pid in found.read_text().split()}
