"""`loopwright resume`: go on with a scenario that was stopped, killed or failed."""

from typing import Annotated

import typer

from loopwright.cli.options import JsonLines, OutputArgument, Overrides, Quiet, overrides_of

NAME = "resume"


def command(
    output: OutputArgument,
    *,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Go on although the workload's inputs have changed.")
    ] = False,
    overrides: Overrides = None,
    quiet: Quiet = False,
    json: JsonLines = False,
) -> None:
    """Go on where a run was stopped or killed: no trial is lost, none counted twice."""
    from loopwright.cli.progress import conduct
    from loopwright.scenario.output import reopen

    loaded = reopen(output, overrides_of(overrides))
    raise typer.Exit(conduct(loaded, output, quiet=quiet, json=json, resume=True, accept_changes=accept_changes))
