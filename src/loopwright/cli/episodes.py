"""`loopwright episodes`: rollouts as people read them."""

import sys
from typing import Annotated

import orjson
import typer

from loopwright.cli.episode_view import show
from loopwright.cli.options import GroupOption, OutputArgument, RunOption, TaskOption
from loopwright.cli.rollout_run import check_selection, reading
from loopwright.core.errors import LedgerError
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import ALL, Selection, rollouts

_LATEST = 3
_FAULTS = 20


def command(
    output: OutputArgument,
    *,
    run: RunOption = None,
    worst: Annotated[
        int | None, typer.Option("--worst", metavar="N", min=1, help="This many with the lowest rewards.")
    ] = None,
    best: Annotated[
        int | None, typer.Option("--best", metavar="N", min=1, help="This many with the highest rewards.")
    ] = None,
    trial: Annotated[
        int | None, typer.Option("--trial", metavar="N", min=1, help="The rollout with this number.")
    ] = None,
    group: GroupOption = None,
    task: TaskOption = None,
    faults: Annotated[bool, typer.Option("--faults", help="Rollouts that failed, the latest first.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Colour each sampled token by its probability.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON object per episode, with all tokens.")] = False,
) -> None:
    """Show rollouts: the task, the outcome and the conversation. By default, the latest three.

    --group and --task show all rollouts of a group or a task, or choose among them with --worst, --best or --faults.
    """
    if sum((worst is not None, best is not None, trial is not None, faults)) > 1:
        raise typer.BadParameter("choose one of --worst, --best, --trial and --faults.")
    which = Selection(group, task)
    if trial is not None and which != ALL:
        raise typer.BadParameter("--trial names one rollout; remove --group and --task.")
    with reading(output, run) as (ledger, about):
        check_selection(ledger, which)
        numbers, more = _select(ledger, worst, best, trial, which, faults=faults, every=json)
        if json:
            for rollout in rollouts(ledger, numbers):
                sys.stdout.buffer.write(orjson.dumps(rollout.as_json(), option=orjson.OPT_APPEND_NEWLINE))
            return
        show(ledger, numbers, about["engine"] if tokens else None)
        if more:
            typer.echo(f"and {more} more; `--json` writes all of them, one per line")


def _select(
    ledger: Ledger,
    worst: int | None,
    best: int | None,
    trial: int | None,
    which: Selection = ALL,
    *,
    faults: bool,
    every: bool,
) -> tuple[list[int], int]:
    """The numbers of the trials to show, from the table of trials alone, and how many more there are."""
    rows, more, (condition, values) = ledger.transaction.rows, 0, which.condition
    if trial is not None:
        stored = ledger.trial(trial)
        if stored is None:
            raise LedgerError(f"{ledger.path}: trial {trial} does not exist; the last is {ledger.last()[0]}.")
        if ledger.payload(trial, "rollout") is None:
            state = stored.outcome or "running"
            raise LedgerError(f"{ledger.path}: trial {trial} has no episode yet ({state}). Look again when it ends.")
        return [trial], 0
    if faults:
        failed = f"FROM trials WHERE fault IS NOT NULL AND outcome <> 'aborted'{condition}"
        limit = -1 if every else _FAULTS
        query = f"SELECT number {failed} ORDER BY number DESC LIMIT ?"
        numbers = [number for (number,) in rows(query, (*values, limit))]
        empty = "no rollout failed"
        more = rows(f"SELECT count(*) {failed}", values)[0][0] - len(numbers)
    elif worst is not None or best is not None:
        order = "reward" if best is None else "reward DESC"
        query = f"SELECT number FROM trials WHERE reward IS NOT NULL{condition} ORDER BY {order}, number LIMIT ?"
        numbers = [number for (number,) in rows(query, (*values, worst or best))]
        empty = "no rollout has a reward yet"
    else:
        ended = f"FROM trials WHERE ifnull(outcome, 'aborted') <> 'aborted'{condition}"
        limit = _LATEST if which == ALL else -1
        query = f"SELECT number {ended} ORDER BY number DESC LIMIT ?"
        numbers, empty = [number for (number,) in rows(query, (*values, limit))][::-1], "no rollout has ended yet"
    if not numbers:
        typer.echo(empty, err=True)
    return numbers, more
