"""`loopwright episodes`: rollouts as people read them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from loopwright.cli.options import OutputArgument, RunOption

if TYPE_CHECKING:
    from loopwright.ledger.ledger import Ledger

NAME = "episodes"
_LATEST = 3
_FAULTS = 20


def command(
    output: OutputArgument,
    *,
    run: RunOption = None,
    worst: Annotated[int | None, typer.Option("--worst", min=1, help="Those with the lowest rewards.")] = None,
    best: Annotated[int | None, typer.Option("--best", min=1, help="Those with the highest rewards.")] = None,
    trial: Annotated[int | None, typer.Option("--trial", min=1, help="The one with this number.")] = None,
    faults: Annotated[bool, typer.Option("--faults", help="Those that ended badly, the latest first.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Colour each sampled token by its probability.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON object per episode, with all tokens.")] = False,
) -> None:
    """Show rollouts: the task, what became of it and the conversation. Without a choice, the latest three."""
    from loopwright.cli.rollout_run import reading

    if sum((worst is not None, best is not None, trial is not None, faults)) > 1:
        raise typer.BadParameter("choose one of --worst, --best, --trial and --faults.")
    with reading(output, run) as (ledger, about):
        numbers, more = _chosen(ledger, worst, best, trial, faults=faults, every=json)
        if json:
            _write_lines(ledger, numbers)
            return
        from loopwright.cli.episode_view import show

        show(ledger, numbers, about["engine"] if tokens else None)
        if more:
            typer.echo(f"and {more} more; `--json` writes all of them, one per line")


def _chosen(
    ledger: "Ledger", worst: int | None, best: int | None, trial: int | None, *, faults: bool, every: bool
) -> tuple[list[int], int]:
    """The numbers of the trials to show, from the table of trials alone, and how many were left out."""
    from loopwright.core.errors import LedgerError

    rows = ledger.transaction.rows
    if trial is not None:
        found = ledger.trial(trial)
        if found is None:
            raise LedgerError(f"{ledger.path}: there is no trial {trial}; the last is {ledger.last()[0]}.")
        if ledger.payload(trial, "rollout") is None:
            state = found.outcome or "running"
            raise LedgerError(f"{ledger.path}: trial {trial} has no episode yet ({state}). Look again when it ends.")
        return [trial], 0
    if faults:
        ended = "FROM trials WHERE fault IS NOT NULL AND outcome <> 'aborted'"
        most = -1 if every else _FAULTS
        numbers = [number for (number,) in rows(f"SELECT number {ended} ORDER BY number DESC LIMIT ?", (most,))]
        none = "no rollout ended badly"
        more = rows(f"SELECT count(*) {ended}")[0][0] - len(numbers)
    elif worst is not None or best is not None:
        order = "reward" if best is None else "reward DESC"
        query = f"SELECT number FROM trials WHERE reward IS NOT NULL ORDER BY {order}, number LIMIT ?"
        numbers, more, none = [n for (n,) in rows(query, (worst or best,))], 0, "no rollout has a reward yet"
    else:
        query = "SELECT number FROM trials WHERE ifnull(outcome, 'aborted') <> 'aborted' ORDER BY number DESC LIMIT ?"
        numbers, more, none = [n for (n,) in rows(query, (_LATEST,))][::-1], 0, "no rollout has ended yet"
    if not numbers:
        typer.echo(none, err=True)
    return numbers, more


def _write_lines(ledger: "Ledger", numbers: Sequence[int]) -> None:
    import sys

    import orjson

    from loopwright.ledger.rollouts import rollouts

    for rollout in rollouts(ledger, numbers):
        sys.stdout.buffer.write(orjson.dumps(rollout.as_json(), option=orjson.OPT_APPEND_NEWLINE))
