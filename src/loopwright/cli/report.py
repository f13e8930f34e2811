"""`loopwright report`: make the report and the exports again from the ledgers."""

import typer

from loopwright.cli.options import OutputArgument
from loopwright.core.errors import LedgerError
from loopwright.scenario.dispatch import write_all


def command(output: OutputArgument) -> None:
    """Make report.html, the CSV files and best.toml again from the ledgers. Works while a run is in progress."""
    if not any(output.glob("*/ledger.db")):
        raise LedgerError(f"no ledger found below {output}. Give the --output directory of a run.")
    code = write_all(output, check=True)
    typer.echo(output / "report.html")
    raise typer.Exit(code)
