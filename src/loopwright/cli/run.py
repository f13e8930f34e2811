"""`loopwright run`: run a scenario."""

from pathlib import Path
from typing import Annotated

import typer

from loopwright.cli.options import JsonLines, Overrides, Quiet, ScenarioFile, overrides_of

NAME = "run"


def command(
    scenario: ScenarioFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the results go; made if it is not there.")],
    *,
    overrides: Overrides = None,
    quiet: Quiet = False,
    json: JsonLines = False,
) -> None:
    """Run a scenario and say what was found."""
    from loopwright.cli.progress import conduct
    from loopwright.scenario.load import load

    raise typer.Exit(conduct(load(scenario, set=overrides_of(overrides)), output, quiet=quiet, json=json))
