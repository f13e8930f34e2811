"""`loopwright doctor`: what is installed, reachable and working here, with the fix for every red line."""

import fcntl
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loopwright.cli.options import emit
from loopwright.core.errors import LoopwrightError
from loopwright.engines.base import engines
from loopwright.execution.devices import visible_devices
from loopwright.execution.ray.system import RaySystem
from loopwright.execution.sandbox.bubblewrap import Bubblewrap
from loopwright.execution.sandbox.disk import why_not_sized
from loopwright.execution.sandbox.docker import Docker
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.sqlite import NETWORK, file_system

_TIMEOUT_S = 10
_MIN_FREE_BYTES = 2**30
_MIN_OPEN_FILES = 1024
_MAX_CLOCK_DIFFERENCE_S = 5.0


@dataclass(frozen=True)
class Finding:
    """One line: whether a thing works, and the fix if it does not."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    needed: bool = False
    """Whether every run needs it."""


def command(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The directory that results will go to.")
    ] = Path(),
    *,
    need: Annotated[
        list[str] | None, typer.Option("--need", metavar="NAME", help="A line that must be green, such as slurm.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON object per line.")] = False,
) -> None:
    """Show what is installed, reachable and working. Exits with 1 if something that is needed is broken."""
    findings = list(examine(output))
    names = [finding.name for finding in findings]
    if unknown := [name for name in need or () if name not in names]:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(names)}.", param_hint="--need")
    findings = [replace(finding, needed=finding.needed or finding.name in (need or ())) for finding in findings]
    if json:
        for finding in findings:
            emit(asdict(finding))
    else:
        _show(findings)
    raise typer.Exit(1 if any(finding.needed and not finding.ok for finding in findings) else 0)


def _show(findings: list[Finding]) -> None:
    table = Table(box=None, padding=(0, 2), show_header=False)
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]FAIL[/]" if finding.needed else "[yellow]--[/]"
        table.add_row(mark, finding.name, escape(finding.detail))
        if not finding.ok:
            table.add_row("", "", f"[bold]fix:[/] {escape(finding.fix)}")
    Console(highlight=False).print(table)


def examine(output: Path) -> Iterator[Finding]:
    """Examine this machine, one thing after another."""
    release = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", sys.version_info >= (3, 11), release, "install Python 3.11 or later", needed=True)
    place = output.absolute()
    while not place.exists():  # as `run` will create it
        place = place.parent
    yield from _examine_directory(place)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = f"raise it in this shell: ulimit -n {4 * _MIN_OPEN_FILES}"
    yield Finding("open files", soft >= _MIN_OPEN_FILES, f"at most {soft}", fix, needed=True)
    yield _attempt("bubblewrap", Bubblewrap().check, "apt-get install bubblewrap, and allow user namespaces")
    obstacle = why_not_sized()
    detail = f"measured, not enforced: {obstacle}" if obstacle else "the kernel enforces a file system for each sandbox"
    fix = "run as root with e2fsprogs installed, or put TMPDIR on a separate file system"
    yield Finding("sandbox disk bound", not obstacle, detail, fix)
    yield _attempt("docker", Docker().check, "start the Docker daemon, and join the group `docker`")
    yield _slurm()
    yield _ray()
    devices = visible_devices()
    fix = "install the driver, or list the devices in [system] gpus; only trials that ask for a GPU need one"
    yield Finding("gpus", bool(devices), ", ".join(devices) or "none is visible", fix)
    for name in engines.names():
        try:
            error: Exception | None = engines.get(name).Config.missing_extra(name)
        except Exception as failure:  # noqa: BLE001  The code of a plug-in may fail in any way.
            error = failure
        detail = "all its packages are installed" if error is None else str(error)
        yield Finding(f"engine {name}", error is None, detail, "install what the message names")
    for extra in metadata("loopwright").get_all("Provides-Extra") or ():
        if extra != "dev":
            yield _extra(extra)


def _examine_directory(place: Path) -> Iterator[Finding]:
    """The directory that results go to: permissions, locks, file system, disk, clock, and a ledger in it."""
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".loopwright-doctor-") as name:
            yield Finding("output directory", ok=True, detail=f"{place} is writable", needed=True)
            directory = Path(name)
            with (directory / "lock").open("w") as file:
                difference_s = abs(os.fstat(file.fileno()).st_mtime - time.time())
                lock = partial(fcntl.flock, file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield _attempt("locks", lock, "mount it with locks", needed=True)
            ledger = directory / "ledger.db"
            yield _attempt("ledger", lambda: Ledger.create(ledger).close(), "use a local disk", needed=True)
    except OSError as error:
        fix = "choose another --output, or make it writable"
        yield Finding("output directory", ok=False, detail=f"{place}: {error.strerror}", fix=fix, needed=True)
        return
    kind = file_system(place)
    journal = (
        "a network file system: ledgers use a rollback journal there, since SQLite's write-ahead log does not work"
    )
    note = f", {journal}" if kind.startswith(NETWORK) else ""
    yield Finding("file system", ok=True, detail=f"{kind or 'unknown'}{note}")
    free = shutil.disk_usage(place).free
    yield Finding("disk", free >= _MIN_FREE_BYTES, f"{free / 2**30:.1f} GiB free", "free some space", needed=True)
    yield Finding(
        "clock",
        difference_s < _MAX_CLOCK_DIFFERENCE_S,
        f"{difference_s:.1f} s between this machine and the file system",
        "synchronise the clocks, for example with chrony",
        needed=True,
    )


def _attempt(name: str, action: Callable[[], object], fix: str, *, needed: bool = False) -> Finding:
    try:
        action()
    except (OSError, LoopwrightError) as error:
        return Finding(name, ok=False, detail=str(error), fix=fix, needed=needed)
    return Finding(name, ok=True, detail="works", needed=needed)


def _slurm() -> Finding:
    missing = [name for name in ("sbatch", "squeue", "scancel", "sinfo") if shutil.which(name) is None]
    if missing:
        fix = "run on a login node of the cluster, or install slurm-client"
        return Finding("slurm", ok=False, detail=f"{', '.join(missing)} not on the PATH", fix=fix)
    fix = "check SLURM_CONF, munge and slurmctld: scontrol ping"
    try:
        command = [str(shutil.which("sinfo")), "--noheader", "--format=%P %a, %D %T"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Finding("slurm", ok=False, detail=f"no answer in {_TIMEOUT_S} s", fix=fix)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["sinfo failed"]
        return Finding("slurm", ok=False, detail=lines[-1], fix=fix)
    return Finding("slurm", ok=True, detail=f"partitions: {'; '.join(done.stdout.split(chr(10))[:5]).strip('; ')}")


def _ray() -> Finding:
    try:
        release = version("ray")
    except PackageNotFoundError:
        return Finding("ray", ok=False, detail="not installed", fix="pip install 'loopwright[ray]'")
    address = os.environ.get("RAY_ADDRESS", "")
    if not address:
        return Finding("ray", ok=True, detail=f"{release}, RAY_ADDRESS is not set: a cluster on this machine")
    from loopwright.execution.ray.connection import find_problem

    if (problem := find_problem(RaySystem(), {"CPU": 1.0})) is not None:
        fix = "start the head node, open its port, or correct RAY_ADDRESS"
        return Finding("ray", ok=False, detail=f"{release}, {problem.message}", fix=fix)
    return Finding("ray", ok=True, detail=f"{release}, the cluster at RAY_ADDRESS {address} answers")


def _extra(extra: str) -> Finding:
    """Whether all packages of an extra are installed."""
    missing = []
    for requirement in requires("loopwright") or ():
        name = re.match(r"[\w.-]+", requirement)
        if name is not None and re.search(rf"""extra == ["']{re.escape(extra)}["']""", requirement):
            try:
                version(name[0])
            except PackageNotFoundError:
                missing.append(name[0])
    detail = f"missing: {', '.join(missing)}" if missing else "installed"
    return Finding(f"extra {extra}", not missing, detail, f"pip install 'loopwright[{extra}]'")
