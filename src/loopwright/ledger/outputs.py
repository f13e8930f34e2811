"""Output directories: which ledgers of a campaign hold searches."""

from pathlib import Path

from loopwright.core.errors import LedgerError
from loopwright.ledger.ledger import Ledger


def search_ledgers(output: Path) -> dict[str, Path]:
    """The ledgers of all searches below a directory, by the name of the run; of one run, if the directory is its own.

    Reads only, so that a run in progress is not disturbed.
    """
    paths = [output / "ledger.db"] if (output / "ledger.db").is_file() else sorted(output.glob("*/ledger.db"))
    if not paths:
        raise LedgerError(f"no ledger found below {output}. Give the --output directory of a run.")
    searches = {}
    for path in paths:
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
