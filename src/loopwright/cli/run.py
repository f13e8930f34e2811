"""`loopwright run`: run a scenario."""

from pathlib import Path
from typing import Annotated

import typer

from loopwright.cli.options import JsonLines, Quiet, ScenarioFile
from loopwright.cli.overrides import Overrides, overrides_of
from loopwright.cli.progress import run_with_progress
from loopwright.scenario.load import load


def command(
    scenario: ScenarioFile,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The directory for results; created if it does not exist.")
    ],
    *,
    overrides: Overrides = None,
    quiet: Quiet = False,
    json: JsonLines = False,
) -> None:
    """Run a scenario and print the result."""
    loaded = load(scenario, set=overrides_of(overrides))
    raise typer.Exit(run_with_progress(loaded, output, quiet=quiet, json=json))
