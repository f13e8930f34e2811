"""The steps of a training run, in the ledger: the numbers of each update and each evaluation, for curves."""

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
    """The numbers measured after this many updates."""

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
        """Write the numbers of a step; NaN becomes null."""
        numbers = orjson.dumps(dict(step.numbers)).decode()
        with self._ledger.transaction as connection:
            connection.execute("INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?)", (kind, step.step, step.at, numbers))
            self._ledger.chain.add("step", step.step, (float(step.at), numbers), kind)

    def forget(self, after: int) -> None:
        """Drop the training steps after this one: training continues here and will repeat them."""
        with self._ledger.transaction:
            self._ledger.chain.update(
                "step", "DELETE FROM steps WHERE kind = 'train' AND step > ? RETURNING step, kind, NULL, NULL", (after,)
            )


def steps(ledger: Ledger, kind: Kind) -> Iterator[Step]:
    """All steps of one kind, in order; none if the run does not train."""
    exists = ledger.transaction.rows("SELECT 1 FROM sqlite_schema WHERE name = 'steps'")
    query = "SELECT step, at, numbers FROM steps WHERE kind = ? ORDER BY step"
    for step, at, numbers in ledger.transaction.rows(query, (kind,)) if exists else ():
        yield Step(step, at, orjson.loads(numbers))
