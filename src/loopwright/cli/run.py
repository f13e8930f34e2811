"""`loopwright run`: run a scenario."""

import time
from pathlib import Path
from typing import Annotated

import typer

from loopwright.cli.cloudai_files import CloudAi, Files, HookDir, SingleSbatch, load_files
from loopwright.cli.options import JsonLines, Quiet
from loopwright.cli.overrides import Overrides
from loopwright.cli.progress import run_with_progress


def command(
    scenario: Files,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="The directory for results; created if it does not exist."),
    ] = None,
    *,
    overrides: Overrides = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the campaign that --output contains, and start over.")
    ] = False,
    quiet: Quiet = False,
    json: JsonLines = False,
    cloudai: CloudAi = False,
    hook_dir: HookDir = None,
    single_sbatch: SingleSbatch = False,
) -> None:
    """Run a scenario and print the result. With --cloudai, --output is by default in the system's output_path."""
    if output is None and not cloudai:
        raise typer.BadParameter("is missing; give a directory for the results.", param_hint="--output")
    loaded, results = load_files(scenario, overrides, cloudai=cloudai, hook_dir=hook_dir, single_sbatch=single_sbatch)
    if output is None:
        output = (results or Path()) / f"{loaded.scenario.name}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    raise typer.Exit(run_with_progress(loaded, output, quiet=quiet, json=json, overwrite=overwrite))
