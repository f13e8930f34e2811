"""`loopwright report`: make the report and the exports again from the ledgers."""

import typer

from loopwright.cli.options import OutputArgument
from loopwright.ledger.outputs import run_ledgers
from loopwright.reports.page import write_all


def command(output: OutputArgument) -> None:
    """Rebuild report.html, the CSV files and best.toml from the ledgers. Works while a run is in progress."""
    run_ledgers(output)  # raises if it has no ledgers
    page = output / "report.html"
    before_ns = page.stat().st_mtime_ns if page.exists() else 0
    code = write_all(output, check=True)
    if page.exists() and page.stat().st_mtime_ns != before_ns:  # otherwise the error says why
        typer.echo(page)
    raise typer.Exit(code)
