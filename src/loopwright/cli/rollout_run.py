"""Which run of an output directory is meant, for the verbs that read rollouts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loopwright.core.errors import LedgerError, did_you_mean
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.outputs import run_ledgers
from loopwright.ledger.rollouts import ALL, Selection
from loopwright.reports.kinds import kind_of

_TASKS = 10_000
"""Among how many tasks a similar name is looked for."""


def rollout_ledger(output: Path, run: str | None) -> Path:
    """The ledger of the run that has rollouts; a LedgerError lists the candidates."""
    ledgers, matches = run_ledgers(output, run), []
    for name, path in ledgers.items():
        with Ledger.read(path) as ledger:
            if kind_of(ledger.state("run", {})) in ("rollout", "training"):
                matches.append(name)
    if not matches:
        raise LedgerError(
            f"there are no rollouts in {output}: {', '.join(ledgers)} has none. Give the output of a run with a "
            "[run.rollout] table."
        )
    if len(matches) > 1:
        raise LedgerError(f"several runs of {output} have rollouts. Choose one: --run {' or --run '.join(matches)}.")
    return ledgers[matches[0]]


@contextmanager
def reading(output: Path, run: str | None) -> Iterator[tuple[Ledger, dict[str, Any]]]:
    """The run's ledger, and what it records about its rollouts."""
    with Ledger.read(rollout_ledger(output, run)) as ledger:
        yield ledger, ledger.state("run")["rollout"]


def check_selection(ledger: Ledger, which: Selection) -> None:
    """A LedgerError if the group or the task does not exist, with what does."""
    condition, values = which.condition
    if which == ALL or ledger.transaction.rows(f"SELECT 1 FROM trials WHERE 1{condition} LIMIT 1", values):
        return
    if which.task is None:
        raise LedgerError(f"{ledger.path}: {which} does not exist; the last group is {ledger.last()[1]}.")
    tasks = [task for (task,) in ledger.transaction.rows("SELECT DISTINCT json_extract(action, '$.task') FROM trials")]
    hint = did_you_mean(which.task, tasks[:_TASKS]) if which.task not in tasks else "The task is in other groups."
    raise LedgerError(f"{ledger.path}: there is no rollout of {which}. {hint}")
