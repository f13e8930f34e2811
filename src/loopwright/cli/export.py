"""`loopwright export`: a run's trials, episodes, training rows or steps as files for other tools."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loopwright.cli.options import OutputArgument

if TYPE_CHECKING:
    from loopwright.ledger.ledger import Ledger

NAME = "export"


class Format(StrEnum):
    """The formats that a run can be exported to."""

    CSV = "csv"
    PARQUET = "parquet"
    JSONL = "jsonl"
    VERL = "verl"


def command(
    output: OutputArgument,
    *,
    format: Annotated[
        Format, typer.Option("--format", "-f", help="What to write; jsonl (episodes) and verl are for rollouts.")
    ] = Format.CSV,
    rows: Annotated[
        bool, typer.Option("--rows", help="Of rollouts, the rows to train on; as parquet, jsonl or verl.")
    ] = False,
    steps: Annotated[
        bool, typer.Option("--steps", help="Of a training, what each step measured; as csv, parquet or jsonl.")
    ] = False,
) -> None:
    """Export each run beside its ledger.

    csv: trajectory.csv and env.csv; parquet: trials.parquet. Of rollouts also jsonl: episodes.jsonl; with --rows
    rows.parquet or rows.jsonl, one row per branch; verl: verl.jsonl, the same with the names of verl's AgentLoopOutput.
    With --steps of a training: steps.csv, steps.parquet or steps.jsonl, one row per step and per evaluation.
    """
    from loopwright.core.errors import LedgerError
    from loopwright.ledger.ledger import Ledger
    from loopwright.ledger.rollouts import has_rollouts
    from loopwright.reports.training.export import has_steps

    if steps and (rows or format is Format.VERL):
        raise typer.BadParameter("--steps are exported as csv, parquet or jsonl, and without --rows.")
    if rows and format is Format.CSV:
        raise typer.BadParameter("rows of tokens do not fit into CSV; add --format parquet, jsonl or verl.")
    ledgers = sorted(output.glob("*/ledger.db"))
    if not ledgers:
        raise LedgerError(f"there is no ledger below {output}. Give the --output directory of a run.")
    of_rollouts = rows or format in (Format.JSONL, Format.VERL)
    write, written = _step_writer(format) if steps else _writer(format, rows=rows), 0
    for path in ledgers:
        with Ledger.read(path) as ledger:
            if not (has_steps(ledger) if steps else has_rollouts(ledger) or not of_rollouts):
                continue
            for file in write(ledger, path.parent):
                typer.echo(file)
                written += 1
    if not written and steps:
        raise LedgerError(f"no run in {output} has trained anything yet, so there are no steps.")
    if not written:
        raise LedgerError(f"there are no rollouts in {output}, so no episodes or rows. Use --format csv or parquet.")


def _step_writer(format: Format) -> "Callable[[Ledger, Path], list[Path]]":
    from loopwright.reports.training import export as steps

    by_format = {Format.CSV: steps.write_csv_steps, Format.PARQUET: steps.write_parquet_steps}
    write = by_format.get(format, steps.write_json_steps)
    return lambda ledger, directory: [write(ledger, directory)]


def _writer(format: Format, *, rows: bool) -> "Callable[[Ledger, Path], list[Path]]":
    from loopwright.reports.export import write_csv, write_parquet
    from loopwright.reports.rollout import export as rollouts

    match format, rows:
        case Format.CSV, _:
            return write_csv
        case Format.PARQUET, False:
            return lambda ledger, directory: [write_parquet(ledger, directory / "trials.parquet")]
        case Format.PARQUET, True:
            return lambda ledger, directory: [rollouts.write_parquet_rows(ledger, directory)]
        case Format.JSONL, False:
            return lambda ledger, directory: [rollouts.write_episodes(ledger, directory)]
        case Format.JSONL, True:
            return lambda ledger, directory: [rollouts.write_rows(ledger, directory)]
        case _:
            return lambda ledger, directory: [rollouts.write_verl(ledger, directory)]
