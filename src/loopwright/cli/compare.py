"""`loopwright compare`: two campaigns side by side."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loopwright.cli.options import emit
from loopwright.core.errors import LedgerError
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.outputs import search_ledger, search_ledgers
from loopwright.reports.formatting import assignments, counted, number, short
from loopwright.reports.objective import Objective
from loopwright.reports.search.headline import describe_difference, title
from loopwright.selection.comparison import CampaignComparison, RecordedRun, compare
from loopwright.selection.estimate import Estimate

_SHOWN = 10


def command(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="The output directory of the first campaign.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="The output directory of the second campaign.")],
    *,
    run: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Which run; by default all that have the same name.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON object per pair of runs.")] = False,
) -> None:
    """Compare two campaigns: what changed, their recommendations, and the configurations that both measured.

    Differences are the second campaign minus the first. Nothing is written; either may still be running.
    """
    for one, two in _pairs(before, after, run):
        with Ledger.read(one) as first, Ledger.read(two) as second:
            comparison = compare(RecordedRun.read(first), RecordedRun.read(second))
        if json:
            emit(_event(comparison))
        else:
            _show(comparison, str(before), str(after))


def _pairs(before: Path, after: Path, run: str | None) -> list[tuple[Path, Path]]:
    if run is not None:
        return [(search_ledger(before, run), search_ledger(after, run))]
    one, two = search_ledgers(before), search_ledgers(after)
    if len(one) == len(two) == 1:  # whatever they are called
        return list(zip(one.values(), two.values(), strict=True))
    if not (names := [name for name in one if name in two]):
        raise LedgerError(
            f"no search has the same name in both: {', '.join(one)} in {before}; {', '.join(two)} in {after}. Give the "
            "directories of two runs instead."
        )
    return [(one[name], two[name]) for name in names]


def _event(comparison: CampaignComparison) -> dict[str, Any]:
    return {
        "event": "comparison",
        "runs": [comparison.before.name, comparison.after.name],
        "objectives": [comparison.before.labels, comparison.after.labels],
        "changes": [asdict(change) for change in comparison.changes],
        "recommendations": [
            [asdict(candidate) for candidate in run.best.front] for run in (comparison.before, comparison.after)
        ],
        "difference": comparison.difference,
        "obstacle": comparison.obstacle or None,
        "common": [asdict(point) for point in comparison.common],
        "shift": comparison.shift,
    }


def _show(comparison: CampaignComparison, before: str, after: str) -> None:
    console = Console(highlight=False, emoji=False, markup=False, soft_wrap=True)
    one, two = comparison.before, comparison.after
    objective = Objective.of((*two.labels, "")[0])
    console.print(one.name if one.name == two.name else f"{one.name} and {two.name}", style="bold")
    if comparison.changes:
        table = Table("changed", "", before, after, box=None, pad_edge=False)
        for change in comparison.changes:
            sides = ("–" if side is None else short(side, 60) for side in (change.before, change.after))
            table.add_row(*map(Text, (change.part, change.name, *sides)))
        console.print(table)
    else:
        console.print("no setting changed: same inputs, space, agent and machine")
    for place, run in ((before, one), (after, two)):
        for candidate in run.best.front[:_SHOWN]:
            values = "; ".join(
                f"{own.text(value)} ({own.evidence(interval, candidate.count)})"
                for value, interval, own in zip(
                    candidate.objectives, candidate.intervals, map(Objective.of, run.labels), strict=True
                )
            )
            chosen = assignments(candidate.action) or "(nothing to choose)"
            console.print(f"{title(candidate)} in {place}: {values}   with   {chosen}")
    if comparison.difference is None:
        console.print(f"difference: cannot be told, {comparison.obstacle}")
    else:
        console.print(f"difference: {_difference(comparison.difference, objective)}")
    _show_common(console, comparison, objective, (before, after))


def _show_common(console: Console, comparison: CampaignComparison, own: Objective, places: tuple[str, str]) -> None:
    if comparison.shift is None:
        console.print("no configuration was measured in both")
        return
    count = counted(len(comparison.common), "configuration")
    low, high = own.interval(comparison.shift.interval) or (None, None)
    shift = f"{own.value(comparison.shift.mean):+.5g}" + ("" if low is None else f" ({number(low)} to {number(high)})")
    console.print(f"{count} measured in both; mean difference: {shift}")
    table = Table("configuration", *places, "difference", box=None, pad_edge=False)
    for point in comparison.common[:_SHOWN]:
        sides = (
            f"{own.text(side.mean)} ({own.evidence(side.interval, side.count)})" for side in (point.before, point.after)
        )
        row = (short(assignments(point.action), 80), *sides, _difference(point.difference, own))
        table.add_row(*map(Text, row))
    console.print(table)
    if (rest := len(comparison.common) - _SHOWN) > 0:
        console.print(f"and {number(rest)} more with smaller differences; --json has all")


def _difference(difference: Estimate, objective: Objective) -> str:
    """A difference with its interval, or that it has none."""
    if difference.interval is None:
        sign = "+" if objective.value(difference.mean) >= 0 else ""
        return f"{sign}{objective.text(difference.mean)} (no interval: measured once)"
    return describe_difference(difference, objective)
