"""`loopwright remeasure`: more measurements of what a search recommends."""

from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from loopwright.agents.search.remeasure import Remeasurement
from loopwright.cli.options import JsonLines, OutputArgument, Quiet
from loopwright.cli.progress import run_with_progress
from loopwright.core.errors import LedgerError
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.outputs import search_ledger, search_ledgers
from loopwright.scenario.dispatch import reopen


def command(
    output: OutputArgument,
    *,
    again: Annotated[
        int,
        typer.Option(
            "--again", "-n", metavar="N", min=1, help="How many measurements of each, under each of its regimes."
        ),
    ] = 5,
    run: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Which run; by default every search.")
    ] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Measure although the workload's inputs have changed.")
    ] = False,
    quiet: Quiet = False,
    json: JsonLines = False,
) -> None:
    """Measure the recommendation of a finished search again; with several objectives, each point of the front.

    The new trials are numbered rows of phase "confirm", and reports and best.toml are rebuilt. The agent's budget
    (`trials`) does not count them.
    """
    paths = search_ledgers(output) if run is None else {run: search_ledger(output, run)}
    for name, path in paths.items():
        with Ledger.read(path) as ledger:
            if not ledger.state("finished"):
                raise LedgerError(f"run {name!r} is not finished. Continue with `loopwright resume {output}`.")
            if not ledger.counts().get("ok"):
                raise LedgerError(f"run {name!r} has no successful trial, so it recommends nothing.")
    loaded = reopen(output)
    # What a plain run waits for has ended.
    runs = (config.model_copy(update={"depends_on": {}}) for config in loaded.runs if config.name in paths)
    loaded = replace(loaded, runs=tuple(runs))
    code = run_with_progress(
        loaded,
        output,
        quiet=quiet,
        json=json,
        resume=True,
        accept_changes=accept_changes,
        agent=partial(Remeasurement, again=again),
    )
    raise typer.Exit(code)
