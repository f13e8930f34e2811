"""`loopwright race`: agents race on a recorded search."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from loopwright.agents.search.race import race
from loopwright.cli.options import OutputArgument, emit, show
from loopwright.envs.replay import Recording
from loopwright.reports.formatting import counted, measured
from loopwright.reports.objective import Objective
from loopwright.reports.race import COLUMNS, quality, rows, write_race
from loopwright.selection.regret import RegretMeter

_MAX_TRIALS = 100


def command(
    output: OutputArgument,
    *,
    agents: Annotated[
        str, typer.Option("--agents", "-a", metavar="NAMES", help="The agents, separated by commas.")
    ] = "tpe,random",
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", min=1, help="How often each agent searches.")] = 20,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials", metavar="N", min=1, help=f"The budget of each; by default as recorded, up to {_MAX_TRIALS}."
        ),
    ] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="Which run, if there are several.")] = None,
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="The page to write; by default OUTPUT/race.html.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON object per agent instead of a table.")] = False,
) -> None:
    """Let agents search a recorded campaign again, and show which would have got furthest. Nothing is run.

    Measured points are answered from the ledger, all others by a model of it. The campaign may still be running.
    """
    names = list(dict.fromkeys(name.strip() for name in agents.split(",") if name.strip()))
    if not names:
        raise typer.BadParameter("name at least one agent, such as --agents tpe,random.", param_hint="--agents")
    recording = Recording.read(output, run)
    budget = trials or min(recording.proposals, _MAX_TRIALS)
    notices = Console(file=sys.stderr, highlight=False, markup=False)
    with notices.status("") as status:
        results = race(
            recording,
            names,
            seeds=seeds,
            trials=budget,
            show=lambda agent, seed: status.update(f"{agent}: seed {seed + 1} of {seeds}"),
        )
    target = write_race(results, recording, page or output / "race.html")
    meter = RegretMeter(recording)
    if json:
        for result in results:
            band = [list(point) for point in result.band()]
            fields = {"estimated": result.estimated, "steps_per_s": result.steps_per_s, "best": meter.best}
            emit({"event": "agent", "agent": result.agent, "band": band, "curves": result.curves, **fields})
        emit({"event": "race", "explained": recording.model.explained, "page": str(target)})
        return
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for row in rows(results, recording):
        table.add_row(*row)
    Console(highlight=False, emoji=False, markup=False).print(table)
    objective = Objective.of(recording.labels[0])
    show(
        f"after {counted(budget, 'trial')}, {counted(seeds, 'seed')}; best recorded: {objective.text(meter.best)}; "
        f"regret of a random choice: {measured(meter.of_chance, objective.name)}"
    )
    show(quality(recording))
    show(f"page: {target}")
