"""Which run of an output directory is meant, for the verbs that look at rollouts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loopwright.core.errors import LedgerError, did_you_mean
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import has_rollouts


def rollout_run(output: Path, run: str | None) -> Path:
    """The ledger of the run that made rollouts; a LedgerError says which there are."""
    ledgers = {path.parent.name: path for path in sorted(output.glob("*/ledger.db"))}
    if not ledgers:
        raise LedgerError(f"there is no ledger below {output}. Give the --output directory of a run.")
    if run is not None and run not in ledgers:
        raise LedgerError(f"there is no run {run!r} in {output}. {did_you_mean(run, list(ledgers))}")
    able = [name for name, path in ledgers.items() if run in (None, name) and _makes_rollouts(path)]
    if not able:
        runs = ", ".join([run] if run else ledgers)
        raise LedgerError(
            f"there are no rollouts in {output}: {runs} made none. Give the output of a run with a [run.rollout] table."
        )
    if len(able) > 1:
        raise LedgerError(f"several runs of {output} made rollouts. Choose one: --run {' or --run '.join(able)}.")
    return ledgers[able[0]]


@contextmanager
def reading(output: Path, run: str | None) -> Iterator[tuple[Ledger, dict[str, Any]]]:
    """The run's ledger, and what it says of its rollouts."""
    with Ledger.read(rollout_run(output, run)) as ledger:
        yield ledger, ledger.state("run")["rollout"]


def _makes_rollouts(path: Path) -> bool:
    with Ledger.read(path) as ledger:
        return has_rollouts(ledger)
