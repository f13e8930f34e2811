"""The page of a race: the regret curves of the agents with their bands, and a table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loopwright.envs.replay import Recording
from loopwright.reports.formatting import evenly, measured, number, percent
from loopwright.reports.objective import Objective
from loopwright.reports.page import render, write_page
from loopwright.selection.regret import CLOSED, RegretCurves, RegretMeter

COLUMNS = (
    "agent",
    "final regret",
    "10 % to 90 % of seeds",
    f"trials to {percent(CLOSED)} less",
    "estimated",
)
_DRAWN = 300


def rows(results: Sequence[RegretCurves], recording: Recording) -> list[tuple[str, ...]]:
    """The table of a race, the least regret first."""
    name, goal = Objective.of(recording.labels[0]).name, (1 - CLOSED) * RegretMeter(recording).of_chance
    table: list[tuple[str, ...]] = []
    for result in sorted(results, key=lambda result: result.band()[-1][1]):
        low, middle, high = result.band()[-1]
        trials = result.trials_to(goal)
        span = f"{number(low)} to {measured(high, name)}"
        trials_to_goal = "not reached" if trials is None else number(trials)
        table.append((result.agent, measured(middle, name), span, trials_to_goal, percent(result.estimated)))
    return table


def quality(recording: Recording) -> str:
    """How far the model behind the points that nobody measured can be trusted, as a sentence."""
    explained = recording.model.explained
    if explained is None:
        return "The record is too small to say how good the model of the other points is."
    return (
        f"The model of the points that nobody measured explains {percent(explained)} of the variance (leave-one-out)."
    )


def write_race(results: Sequence[RegretCurves], recording: Recording, target: Path) -> Path:
    """Write the page of a race."""
    trials = max(len(result.band()) for result in results)
    meter = RegretMeter(recording)
    section = render(
        "race.html",
        columns=COLUMNS,
        rows=rows(results, recording),
        objective=Objective.of(recording.labels[0]),
        best=meter.best,
        chance=meter.of_chance,
        names=[result.agent for result in results],
        quality=quality(recording),
        points=len(recording.points),
        seeds=len(results[0].curves),
        trials=trials,
    )
    lines: list[Mapping[str, Any]] = []
    for result in results:
        # Points as report.js draws them: first trial, median, low, high, last trial.
        points = [(n, middle, low, high, n) for n, (low, middle, high) in enumerate(result.band(), 1)]
        lines.append({"name": result.agent, "marked": False, "rows": evenly(points, _DRAWN)})
    chart: Mapping[str, Any] = {
        "curves": [{"title": "regret", "lines": lines}],
        "steps": trials,
        "skipped": [],
        "unit": "trial",
    }
    return write_page(
        target,
        title=f"Race on {recording.about.get('name', recording.source.name)}",
        subtitle=f"{number(len(results))} agents",
        sections=[section],
        charts=[chart],
    )
