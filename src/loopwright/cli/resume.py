"""`loopwright resume`: continue a scenario that was stopped, killed or failed."""

from typing import Annotated

import typer

from loopwright.cli.options import JsonLines, OutputArgument, Quiet
from loopwright.cli.overrides import Overrides, overrides_of
from loopwright.cli.progress import run_with_progress
from loopwright.scenario.dispatch import reopen


def command(
    output: OutputArgument,
    *,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Continue although the workload's inputs have changed.")
    ] = False,
    overrides: Overrides = None,
    quiet: Quiet = False,
    json: JsonLines = False,
) -> None:
    """Continue a run that was stopped or killed: no trial is lost, none is counted twice."""
    loaded = reopen(output, overrides_of(overrides))
    code = run_with_progress(loaded, output, quiet=quiet, json=json, resume=True, accept_changes=accept_changes)
    raise typer.Exit(code)
