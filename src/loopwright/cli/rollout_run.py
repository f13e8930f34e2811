"""Which run of an output directory is meant, for the verbs that read rollouts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loopwright.core.errors import LedgerError, did_you_mean
from loopwright.ledger.ledger import Ledger
from loopwright.reports.kinds import kind_of


def rollout_ledger(output: Path, run: str | None) -> Path:
    """The ledger of the run that has rollouts; a LedgerError lists the candidates."""
    ledgers = {path.parent.name: path for path in sorted(output.glob("*/ledger.db"))}
    if not ledgers:
        raise LedgerError(f"no ledger found below {output}. Give the --output directory of a run.")
    if run is not None and run not in ledgers:
        raise LedgerError(f"{output} has no run {run!r}. {did_you_mean(run, list(ledgers))}")
    matches = []
    for name in ledgers if run is None else [run]:
        with Ledger.read(ledgers[name]) as ledger:
            if kind_of(ledger.state("run", {})) in ("rollout", "training"):
                matches.append(name)
    if not matches:
        runs = ", ".join([run] if run else ledgers)
        raise LedgerError(
            f"there are no rollouts in {output}: {runs} has none. Give the output of a run with a [run.rollout] table."
        )
    if len(matches) > 1:
        raise LedgerError(f"several runs of {output} have rollouts. Choose one: --run {' or --run '.join(matches)}.")
    return ledgers[matches[0]]


@contextmanager
def reading(output: Path, run: str | None) -> Iterator[tuple[Ledger, dict[str, Any]]]:
    """The run's ledger, and what it records about its rollouts."""
    with Ledger.read(rollout_ledger(output, run)) as ledger:
        yield ledger, ledger.state("run")["rollout"]
