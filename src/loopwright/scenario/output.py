"""The output directory: held by one process at a time, and enough to go on from."""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loopwright.core.errors import LedgerError, OutputBusy, StorageError, storage
from loopwright.reports.export import replacing
from loopwright.scenario.load import LoadedScenario, load


@contextmanager
def hold(output: Path) -> Iterator[None]:
    """Keep every other process out of this directory; the hold ends with the process, however it ends."""
    with storage(output, then="nothing was started"):
        output.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(output / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(descriptor, output)
        with storage(output):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, output: Path) -> None:
    deadline = time.monotonic() + 5.0
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
        # A child that a killed process was just starting holds the lock for a moment longer than its parent lived.
        if Path(f"/proc/{holder or 'unknown'}").exists() or time.monotonic() > deadline:
            raise OutputBusy(
                f"{output} is in use by process {holder or '(unknown)'}. Stop it, or choose another --output."
            )
        time.sleep(0.05)


def begin(loaded: LoadedScenario, output: Path) -> None:
    """Put down what a later `resume` needs; a directory with an earlier campaign is refused."""
    if (output / "campaign.json").exists() or any(output.glob("*/ledger.db")):
        raise StorageError(
            f"{output} already holds a campaign. Go on with `loopwright resume {output}`, or choose another --output."
        )
    with replacing(output / "scenario.toml") as file:
        file.write(loaded.text)
    facts = {"scenario": loaded.label, "home": str(loaded.directory), "started_at": time.time()}
    if loaded.overrides:
        facts["set"] = loaded.overrides
    with replacing(output / "campaign.json") as file:
        json.dump(facts, file, indent=2)


def reopen(output: Path, set: Mapping[str, Any] | None = None) -> LoadedScenario:
    """The scenario of an earlier campaign, as it was then, with its directory and overrides; `set` adds to these."""
    facts = output / "campaign.json"
    if not facts.is_file():
        raise LedgerError(f"{output} holds no campaign. Give the --output directory of an earlier `loopwright run`.")
    try:
        campaign = json.loads(facts.read_text())
        directory, overrides = Path(campaign["home"]), {**campaign.get("set", {}), **(set or {})}
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f'{facts} is damaged ({error!r}); its "home" is the scenario\'s directory.') from error
    return load(output / "scenario.toml", directory=directory, set=overrides)
