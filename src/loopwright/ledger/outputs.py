"""Output directories: the ledgers of a campaign, and which of them hold searches."""

from pathlib import Path

from loopwright.core.errors import LedgerError, did_you_mean
from loopwright.ledger.ledger import Ledger


def run_ledgers(output: Path, run: str | None = None) -> dict[str, Path]:
    """The ledgers below a directory, by the name of the run; only one if `run` names it."""
    ledgers = {path.parent.name: path for path in sorted(output.glob("*/ledger.db"))}
    if not ledgers:
        raise LedgerError(f"{output} contains no ledger. Give the --output directory of a run.")
    if run is None:
        return ledgers
    if run not in ledgers:
        raise LedgerError(f"{output} has no run {run!r}. {did_you_mean(run, list(ledgers))}")
    return {run: ledgers[run]}


def search_ledgers(output: Path) -> dict[str, Path]:
    """The ledgers of all searches below a directory, by the name of the run; of one run, if the directory is its own.

    Reads only, so that a run in progress is not disturbed.
    """
    own = output / "ledger.db"
    searches = {}
    for path in [own] if own.is_file() else run_ledgers(output).values():
        with Ledger.read(path) as ledger:
            about = ledger.state("run", {})
        if about.get("kind") == "search":
            searches[str(about.get("name"))] = path
    if not searches:
        raise LedgerError(f"{output} has no search: none of its runs has a [run.workload].")
    return searches


def search_ledger(output: Path, run: str | None = None) -> Path:
    """The ledger of the search of this name, or of the only one."""
    searches = search_ledgers(output)
    if run is None and len(searches) > 1:
        raise LedgerError(f"{output} has several searches; choose one with --run: {', '.join(searches)}.")
    if run is not None and run not in searches:
        raise LedgerError(f"{output} has no search {run!r}. Its searches: {', '.join(searches)}.")
    return next(iter(searches.values())) if run is None else searches[run]
