"""The steps of a training run, in the ledger: what each update and each evaluation measured, for curves."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from loopwright.ledger.ledger import Ledger

Kind = Literal["train", "eval"]
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS steps (kind TEXT NOT NULL, step INTEGER NOT NULL, at REAL NOT NULL, "
    "numbers TEXT NOT NULL, PRIMARY KEY (kind, step)) STRICT, WITHOUT ROWID"
)


@dataclass(frozen=True, slots=True)
class Step:
    """What was measured after this many updates."""

    step: int
    at: float
    numbers: Mapping[str, Any]


class Steps:
    """Written by a trainer, once per step; a step that is repeated after a crash replaces itself."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        with ledger.transaction as connection:
            connection.execute(_SCHEMA)

    def add(self, kind: Kind, step: Step) -> None:
        """Write down what was measured; numbers that are none are left out."""
        numbers = orjson.dumps(dict(step.numbers)).decode()
        with self._ledger.transaction as connection:
            connection.execute("INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?)", (kind, step.step, step.at, numbers))

    def forget(self, after: int) -> None:
        """Training goes on after this step: what came later will come again."""
        with self._ledger.transaction as connection:
            connection.execute("DELETE FROM steps WHERE kind = 'train' AND step > ?", (after,))


def steps(ledger: Ledger, kind: Kind) -> Iterator[Step]:
    """What was measured, in order; nothing where a run trains nothing."""
    known = ledger.transaction.rows("SELECT 1 FROM sqlite_schema WHERE name = 'steps'")
    query = "SELECT step, at, numbers FROM steps WHERE kind = ? ORDER BY step"
    for step, at, numbers in ledger.transaction.rows(query, (kind,)) if known else ():
        yield Step(step, at, orjson.loads(numbers))
