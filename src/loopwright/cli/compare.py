"""`loopwright compare`: two campaigns side by side."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loopwright.cli.options import emit, show
from loopwright.core.errors import LedgerError, printable
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.outputs import search_ledger, search_ledgers
from loopwright.reports.formatting import counted, ends, number, pairs, short
from loopwright.reports.objective import Interval, Objective, evidence
from loopwright.reports.search.headline import describe, describe_difference, title
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
    one, two = comparison.before, comparison.after
    console = Console(highlight=False, emoji=False, markup=False)
    console.print(one.name if one.name == two.name else f"{one.name} and {two.name}", style="bold")
    if comparison.changes:
        table = Table("changed", "", before, after, box=None, pad_edge=False)
        for change in comparison.changes:
            most = 12 if change.name == "fingerprint" else 300
            sides = ("–" if side is None else printable(short(side, most)) for side in (change.before, change.after))
            table.add_row(*map(Text, (change.part, change.name, *sides)))
        console.print(table)
    else:
        show("no setting changed: same inputs, space, agent and machine")
    for place, run in ((before, one), (after, two)):
        objectives = [Objective.of(label) for label in run.labels]
        for candidate in run.best.front[:_SHOWN]:
            show(f"{title(candidate)} in {place}:   {describe(candidate, objectives)}")
    objective = Objective.of((*two.labels, "")[0])
    if comparison.difference is None:
        show(f"difference: unknown, because {comparison.obstacle}")
    elif comparison.difference.interval is None:
        show(f"difference: {_signed(comparison.difference, objective)} (no interval: measured once)")
    else:
        show(f"difference: {describe_difference(comparison.difference, objective)}")
    _show_common(console, comparison, objective, (before, after))


def _show_common(console: Console, comparison: CampaignComparison, own: Objective, places: tuple[str, str]) -> None:
    if comparison.shift is None:
        show("no configuration was measured in both")
        return
    count = counted(len(comparison.common), "configuration")
    interval = own.interval(comparison.shift.interval)
    show(
        f"{count} measured in both; mean difference: {_signed(comparison.shift, own)}"
        + ("" if interval is None else f" ({ends(*interval)})")
    )
    rows = [
        (
            _stack(own.text(point.before.mean), own.interval(point.before.interval), point.before.count),
            _stack(own.text(point.after.mean), own.interval(point.after.interval), point.after.count),
            _stack(_signed(point.difference, own), own.interval(point.difference.interval)),
            printable(pairs(point.action)),
        )
        for point in comparison.common[:_SHOWN]
    ]
    table = Table(box=None, pad_edge=False)
    for place, header in enumerate((*places, "difference")):
        # A fixed width, since rich would crop the configuration instead of breaking its line.
        table.add_column(header, width=max(len(line) for row in rows for line in row[place].splitlines()))
    table.add_column("configuration")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
    if (rest := len(comparison.common) - _SHOWN) > 0:
        show(f"and {number(rest)} more with smaller differences; --json has all")


def _stack(value: str, interval: Interval | None, count: int | None = None) -> str:
    """A number, its interval and how often it was measured, one below the other."""
    lines = [value, "" if interval is None else ends(*interval)]
    if count is not None:
        lines.append(evidence(None, count))
    elif interval is None:
        lines.append("no interval")
    elif interval[0] <= 0 <= interval[1]:
        lines.append("may be chance")
    return "\n".join(filter(None, lines))


def _signed(difference: Estimate, objective: Objective) -> str:
    return f"{'+' if objective.value(difference.mean) >= 0 else ''}{objective.text(difference.mean)}"
