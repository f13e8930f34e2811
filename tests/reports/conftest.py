"""Runs to report on, and the browser that renders reports."""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from loopwright.core.outcome import Outcome
from loopwright.ledger.ledger import Ledger
from tests.reports.ledgers import FakeRun, action_of, describe, gflops, logs


@pytest.fixture
def begin(tmp_path: Path):
    """Start a run in the output directory `tmp_path`; its ledger stays open until the test ends."""
    ledgers: list[Ledger] = []

    def begin(name: str = "matmul", state: bool = True, **about: Any) -> FakeRun:
        (tmp_path / name).mkdir()
        ledger = Ledger.create(tmp_path / name / "ledger.db")
        ledgers.append(ledger)
        if state:
            describe(ledger, name, **about)
        return FakeRun(ledger)

    yield begin
    for ledger in ledgers:
        ledger.close()


@pytest.fixture
def campaign(begin, tmp_path: Path) -> Callable[..., FakeRun]:
    """A realistic search that improves; some trials fail or come from the cache."""

    def campaign(name: str = "matmul", trials: int = 60, **about: Any) -> FakeRun:
        run, random = begin(name, **{"budget": trials} | about), Random(name)
        for n in range(trials):
            action, luck = action_of(random, n / trials), random.random()
            used = {"wall_s": 1 + random.random(), "user_s": 0.9, "system_s": 0.05, "max_rss_bytes": 3e7}
            if luck < 0.06:
                reason = "killed by signal 11 (SIGSEGV)"
                logs(tmp_path, name, run.add(action, outcome=Outcome.CRASHED, reason=reason, usage=used).number)
            elif luck < 0.09:
                run.add(action, outcome=Outcome.TIMEOUT, reason="timed out after 20 s", usage=used)
            elif action["tile"] > action["size"]:
                run.add(action, outcome=Outcome.INFEASIBLE, reason="tile <= size does not hold")
            else:
                speed = gflops(action, random)
                metrics = {"gflops": speed, "seconds": 40 / speed}
                run.add(action, speed, metrics=metrics, usage=used, cached_from="3" if luck > 0.95 else None)
        return run

    return campaign


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the browser."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None and shutil.which("apt-get") is None:
        pytest.skip("neither chromium nor apt-get is here; install chromium by hand to run this")
    assert path, "chromium is missing: run `make setup`, or `apt-get install -y chromium`"
    return path


@dataclass(frozen=True)
class Rendered:
    dom: str
    log: str


@pytest.fixture
def render(chromium: str, tmp_path_factory) -> Callable[..., Rendered]:
    """Open a page in headless Chromium and return its DOM."""

    def render(page: Path, *flags: str) -> Rendered:
        command = [
            chromium,
            *["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"],
            *["--disable-background-networking", "--disable-component-update", "--disable-sync"],
            *["--disable-dev-shm-usage", "--enable-logging=stderr", "--v=0", "--virtual-time-budget=30000"],
            f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
            *(flags or ("--dump-dom",)),
            page.as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
        return Rendered(done.stdout, done.stderr)

    return render
