"""The shared cache: measurements that several runs may use, in one small SQLite file."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import orjson

from loopwright.ledger.sqlite import connect, explained, text


class SharedCache:
    """Measurements that several runs share: one small SQLite file, written by any of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with explained(path), closing(connect(path, "NORMAL")) as connection:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS results "
                "(key TEXT PRIMARY KEY, source TEXT NOT NULL, metrics TEXT NOT NULL) STRICT, WITHOUT ROWID"
            )
        self._connection = connect(path, "NORMAL")

    def find(self, key: str) -> tuple[str, dict[str, float]] | None:
        """Where a measurement comes from, and its metrics."""
        with explained(self.path):
            row = self._connection.execute("SELECT source, metrics FROM results WHERE key = ?", (key,)).fetchone()
        return None if row is None else (row[0], orjson.loads(row[1]))

    def put(self, key: str, source: str, metrics: Mapping[str, float]) -> None:
        """Offer a measurement to the other runs; the first one stays."""
        with explained(self.path):
            self._connection.execute("INSERT OR IGNORE INTO results VALUES (?, ?, ?)", (key, source, text(metrics)))

    def close(self) -> None:
        """Close the file."""
        self._connection.close()
