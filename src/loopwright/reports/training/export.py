"""Exports of a training: what each step and each evaluation measured, as a table."""

import csv
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from loopwright.ledger.ledger import Ledger
from loopwright.ledger.steps import Kind, steps
from loopwright.reports.export import parquet_modules, replacement, replacing, write_lines

_KINDS: tuple[Kind, ...] = ("train", "eval")


def write_csv_steps(ledger: Ledger, directory: Path) -> Path:
    """`steps.csv`: a line per step and per evaluation; a number that was not measured is empty."""
    path, names = directory / "steps.csv", _names(ledger)
    with replacing(path) as file:
        rows = csv.DictWriter(file, names)
        rows.writeheader()
        rows.writerows(_rows(ledger))
    return path


def write_json_steps(ledger: Ledger, directory: Path) -> Path:
    """`steps.jsonl`: the same as an object per line."""
    return write_lines(directory / "steps.jsonl", _rows(ledger))


def write_parquet_steps(ledger: Ledger, directory: Path) -> Path:
    """`steps.parquet`: the same, typed."""
    pa, pq = parquet_modules()
    path = directory / "steps.parquet"
    schema = pa.schema({"kind": pa.string(), "step": pa.int64()} | dict.fromkeys(_names(ledger)[2:], pa.float64()))
    rows = list(_rows(ledger))
    for row in rows:
        for name in row.keys() - {"kind", "step"}:
            row[name] = float(row[name]) if isinstance(row[name], (int, float)) else None
    with replacement(path) as part:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), part)
    return path


def has_steps(ledger: Ledger) -> bool:
    """Whether the run has training steps."""
    return next(_rows(ledger), None) is not None


def _rows(ledger: Ledger) -> Iterator[dict[str, Any]]:
    for kind in _KINDS:
        for step in steps(ledger, kind):
            yield {"kind": kind, "step": step.step, "at": step.at, **step.numbers}


def _names(ledger: Ledger) -> list[str]:
    return list(dict.fromkeys(chain(("kind", "step", "at"), *_rows(ledger))))
