"""`loopwright check`: whether the ledgers of an output directory are intact."""

from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from loopwright.cli.options import OutputArgument, emit, show
from loopwright.core.errors import LedgerError
from loopwright.ledger.check import Check, accept_ledger, check_ledger
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.outputs import run_ledgers
from loopwright.reports.formatting import counted
from loopwright.scenario.dispatch import hold

_MOST_LINES = 20


def command(
    output: OutputArgument,
    *,
    accept: Annotated[
        bool, typer.Option("--accept", help="Record damaged ledgers as they are now, so that `resume` continues them.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON object per run.")] = False,
) -> None:
    """Check every ledger against its checksums: structure, events, rows and the head file.

    Exits with 1 if a ledger is damaged. Works while a run is in progress; --accept does not.
    """
    ledgers, damaged = run_ledgers(output), False
    with ExitStack() as stack:
        if accept:
            stack.enter_context(hold(output))
        for path in ledgers.values():
            try:
                Ledger.read(path).close()  # a ledger at all, and of our version
                check = check_ledger(path)
                damage = check.damage
                if damage and accept:
                    check = accept_ledger(path)
            except LedgerError as error:
                check = Check(path, damage=[str(error)])
                damage = check.damage
            damaged |= bool(check.damage)
            if json:
                facts = {"run": path.parent.name, "ok": not check.damage, "trials": check.trials}
                emit({**facts, "events": check.events, "damage": check.damage, "accepted": check.accepted})
            else:
                _show(check, damage, output)
    raise typer.Exit(1 if damaged else 0)


def _show(check: Check, damage: list[str], output: Path) -> None:
    checked = f"{counted(check.trials, 'trial')}, {counted(check.events, 'event')} and ledger.head"
    state = "DAMAGED" if check.damage else "accepted" if damage else "ok"
    show(f"{check.path.parent.name}: {state} ({checked})")
    for line in damage[:_MOST_LINES]:
        show(line, indent=2)
    if len(damage) > _MOST_LINES:
        show(f"and {len(damage) - _MOST_LINES:,} more; --json lists all", indent=2)
    if check.damage:
        show(
            "next: restore the run's folder from a copy, or accept the ledger as it is with "
            f"`loopwright check {output} --accept`",
            indent=2,
        )
    for earlier in [] if damage else check.accepted:
        day = datetime.fromtimestamp(earlier["at"], UTC).strftime("%Y-%m-%d %H:%M UTC")
        differences = counted(len(earlier["damage"]), "difference")
        show(f"accepted at {day}: {differences}, {earlier['damage'][0]}", indent=2)
