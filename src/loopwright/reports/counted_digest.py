"""The digest of a run with too many trials to hold in memory: the ledger counts them, and only failures are listed."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from loopwright.ledger.ledger import Ledger
from loopwright.reports.search.digest import Digest, FailureGroup, basics, grouped_failures, span_of

Failure = tuple[int, str, str, str]
"""A failed trial: number, outcome, fault, reason."""
_FAILURES = 10_000


@dataclass(frozen=True)
class CountedDigest(Digest):
    """The outcomes of a run, and its first failures."""

    counts: Mapping[str, int] = field(default_factory=dict)
    failed_trials: Sequence[Failure] = ()

    @cached_property
    def outcomes(self) -> Counter[str]:
        return Counter({name: count for name, count in self.counts.items() if name != "cached"})

    def failures(self) -> list[FailureGroup]:
        return grouped_failures(self.failed_trials)


def counted_basics(ledger: Ledger) -> dict[str, Any]:
    """The fields that every such digest has."""
    return {**basics(ledger), "trials": (), "trouble": "", "counts": ledger.counts(), "span": span_of(ledger)}


def first_failures(ledger: Ledger, condition: str) -> list[Failure]:
    """The first failed trials among those that meet an SQL condition."""
    return ledger.transaction.rows(
        "SELECT number, outcome, ifnull(fault, 'unknown'), reason FROM trials "
        f"WHERE outcome <> 'ok' AND {condition} ORDER BY number LIMIT {_FAILURES}"
    )


def rows_in_pages(ledger: Ledger, columns: str, condition: str) -> Iterator[Sequence[Any]]:
    """The number and other columns of all trials that meet an SQL condition, in pages: there may be millions."""
    after = 0
    query = f"SELECT {columns} FROM trials WHERE number > ? AND {condition} ORDER BY number LIMIT 5000"
    while rows := ledger.transaction.rows(query, (after,)):
        yield from rows
        after = rows[-1][0]
