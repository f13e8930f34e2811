"""The output directory: locked by one process at a time, with everything that a resumed run needs."""

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
from loopwright.scenario.kinds.base import LoadedScenario
from loopwright.scenario.load import load


@contextmanager
def hold(output: Path) -> Iterator[None]:
    """Lock the directory against other processes. The lock ends with the process, however it ends."""
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
        # A child that a killed process was just starting keeps the lock a moment longer than its parent lived.
        if Path(f"/proc/{holder or 'unknown'}").exists() or time.monotonic() > deadline:
            raise OutputBusy(
                f"{output} is in use by process {holder or '(unknown)'}. Stop it, or choose another --output."
            )
        time.sleep(0.05)


def begin(loaded: LoadedScenario, output: Path) -> None:
    """Write what `resume` needs. A directory with an earlier campaign is an error."""
    if (output / "campaign.json").exists() or any(output.glob("*/ledger.db")):
        raise StorageError(
            f"{output} already contains a campaign. Continue it with `loopwright resume {output}`, or choose another "
            "--output."
        )
    with replacing(output / "scenario.toml") as file:
        file.write(loaded.text)
    campaign: dict[str, Any] = {"scenario": loaded.label, "home": str(loaded.directory), "started_at": time.time()}
    if loaded.overrides:
        campaign["set"] = loaded.overrides
    with replacing(output / "campaign.json") as file:
        json.dump(campaign, file, indent=2)


def reopen(output: Path, set: Mapping[str, Any] | None = None) -> LoadedScenario:
    """The scenario of an earlier campaign, as it was then, with its directory and overrides; `set` adds to these."""
    file = output / "campaign.json"
    if not file.is_file():
        raise LedgerError(f"{output} contains no campaign. Give the --output directory of an earlier `loopwright run`.")
    try:
        campaign = json.loads(file.read_text())
        directory, overrides = Path(campaign["home"]), {**campaign.get("set", {}), **(set or {})}
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f'{file} is damaged ({error!r}); its "home" is the scenario\'s directory.') from error
    return load(output / "scenario.toml", directory=directory, set=overrides)
