"""`loopwright export`: a run's trials as files for other tools."""

from enum import StrEnum
from typing import Annotated

import typer

from loopwright.cli.options import OutputArgument

NAME = "export"


class Format(StrEnum):
    """The formats that trials can be exported to."""

    CSV = "csv"
    PARQUET = "parquet"


def command(
    output: OutputArgument,
    *,
    format: Annotated[Format, typer.Option("--format", "-f", help="What to write.")] = Format.CSV,
) -> None:
    """Export the trials of each run beside its ledger: trajectory.csv and env.csv, or trials.parquet."""
    from loopwright.core.errors import LedgerError
    from loopwright.core.ledger import Ledger
    from loopwright.reports.export import write_csv, write_parquet

    ledgers = sorted(output.glob("*/ledger.db"))
    if not ledgers:
        raise LedgerError(f"there is no ledger below {output}. Give the --output directory of a run.")
    for path in ledgers:
        with Ledger.read(path) as ledger:
            if format is Format.CSV:
                written = write_csv(ledger, path.parent)
            else:
                written = [write_parquet(ledger, path.parent / "trials.parquet")]
        for file in written:
            typer.echo(file)
