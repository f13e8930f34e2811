"""`loopwright report`: make the report and the exports again from the ledgers."""

import typer

from loopwright.cli.options import OutputArgument

NAME = "report"


def command(output: OutputArgument) -> None:
    """Make report.html, the CSV files and best.toml again, from the ledgers alone; also while a run goes on."""
    from loopwright.core.errors import LedgerError
    from loopwright.scenario.dispatch import write_all

    if not any(output.glob("*/ledger.db")):
        raise LedgerError(f"there is no ledger below {output}. Give the --output directory of a run.")
    code = write_all(output)
    typer.echo(output / "report.html")
    raise typer.Exit(code)
