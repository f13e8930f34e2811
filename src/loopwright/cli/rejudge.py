"""`loopwright rejudge`: score stored rollouts again with another judger, and show what changes."""

import asyncio
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loopwright.cli.options import OutputArgument, RunOption, emit, progress_bar
from loopwright.cli.rollout_run import rollout_ledger
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import Rejudgement, add_rejudgements
from loopwright.reports.formatting import number, short
from loopwright.rollouts.judgers.base import JudgerConfig
from loopwright.rollouts.rejudge import Changes, describe, read_judger, rejudge
from loopwright.scenario.dispatch import hold


def command(
    output: OutputArgument,
    judger: Annotated[
        Path,
        typer.Option(
            "--judger", "-j", metavar="FILE", help="A TOML file with a judger, at the top level or in a [judger] table."
        ),
    ],
    *,
    run: RunOption = None,
    write: Annotated[
        bool, typer.Option("--write", help="Store the new verdicts in the ledger, beside the old ones.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON object per episode, then the summary.")] = False,
) -> None:
    """Judge stored episodes again without running them, and show what changes. Rewards are never overwritten."""
    config = read_judger(judger)
    path = rollout_ledger(output, run)
    with ExitStack() as stack:
        if write:
            stack.enter_context(hold(output))
        ledger = stack.enter_context(Ledger.open(path) if write else Ledger.read(path))
        changes = asyncio.run(_judge(ledger, config, judger.absolute(), write=write, json=json))
    if json:
        emit({"event": "result", "run": path.parent.name, "written": write, **changes.as_json()})
    else:
        _show(changes, write=write)
    raise typer.Exit(0 if changes.both + changes.newly_scored else 1)


async def _judge(ledger: Ledger, config: JudgerConfig, file: Path, *, write: bool, json: bool) -> Changes:
    changes, id = Changes(), f"{file.stem}-{len(ledger.state('rejudged', {})) + 1}"

    def record(changes: Changes | None) -> None:
        if write:
            ledger.set_state("rejudged", {**ledger.state("rejudged", {}), id: describe(config, file, changes)})

    # Recorded before the first verdict: the id tells what a killed process left behind from the next one's verdicts.
    record(None)
    ((total,),) = ledger.transaction.rows("SELECT count(*) FROM payloads WHERE kind = 'rollout'")
    with progress_bar("judging", total, hidden=json) as advance:
        async with aclosing(rejudge(ledger, config, file.parent)) as results:
            async for group, skipped in results:
                changes.skipped += skipped
                if group:
                    changes.add(group)
                if write:
                    new = [(change.trial, Rejudgement(id, change.after, change.reason)) for change in group]
                    add_rejudgements(ledger, new)
                for change in group if json else ():
                    emit({"event": "verdict", **change.as_json()})
                advance(len(group) + skipped)
    record(changes)
    return changes


def _show(changes: Changes, *, write: bool) -> None:
    console = Console(highlight=False, emoji=False)
    for line in _summary(changes):
        console.print(line, markup=False, soft_wrap=True)
    if changes.largest:
        table = Table("trial", "group", "task", "before", "after", "change", box=None, padding=(0, 2))
        for change in changes.largest:
            before, after, difference = change.before, change.after, change.difference
            values = [number(before.value if before else None), number(after.value if after else None)]
            sign = "+" if difference and difference > 0 else ""
            facts = [str(change.trial), str(change.group), escape(short(change.task, 40))]
            table.add_row(*facts, *values, f"{sign}{number(difference)}")
        console.print("the largest changes:")
        console.print(table)
    for reason, count in sorted(changes.reasons.items(), key=lambda item: -item[1])[:3]:
        console.print(f"{count} × no verdict: {short(reason)}", markup=False)
    console.print(
        "stored in the ledger beside the old verdicts" if write else "nothing was written; --write stores the verdicts"
    )


def _summary(changes: Changes) -> list[str]:
    skipped = f", {number(changes.skipped)} lost rollouts left out" if changes.skipped else ""
    lines = [f"{number(changes.episodes)} episodes of {number(changes.groups)} groups judged again{skipped}"]
    if changes.means is not None:
        before, after = changes.means
        over = "" if changes.both == changes.episodes else f" over the {number(changes.both)} that both scored"
        parts = ", ".join(f"{name} {number(mean, 3)}" for name, mean in changes.part_means.items())
        now = f" ({parts})" if len(changes.parts) > 1 else ""
        lines.append(f"mean reward {number(before, 3)} → {number(after, 3)}{now}{over}")
        lines.append(
            f"{number(changes.changed)} rewards changed: {number(changes.up)} up, {number(changes.down)} down; "
            f"{number(changes.both - changes.changed)} as before"
        )
    lines.append(
        f"{number(changes.newly_scored)} newly scored, {number(changes.newly_failed)} newly without a verdict, "
        f"{number(changes.still_failed)} still without one"
    )
    if changes.pairs:
        share = 100 * changes.flipped_pairs / changes.pairs
        lines.append(
            f"within groups: {number(changes.flipped_pairs)} of {number(changes.pairs)} pairs change order "
            f"({share:.3g} %), {number(changes.flipped_signs)} advantages change sign, "
            f"{number(changes.new_best)} groups have another best"
        )
    return lines
