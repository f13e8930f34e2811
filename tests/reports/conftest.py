"""Runs to report on, and the browser that reports are tried in."""

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
from tests.reports.story import Story, action_of, describe, gflops, logs


@pytest.fixture
def begin(tmp_path: Path):
    """Begin a run in the output directory `tmp_path`; its story goes on until the test ends."""
    opened: list[Ledger] = []

    def begin(name: str = "matmul", state: bool = True, **about: Any) -> Story:
        (tmp_path / name).mkdir()
        ledger = Ledger.create(tmp_path / name / "ledger.db")
        opened.append(ledger)
        if state:
            describe(ledger, name, **about)
        return Story(ledger)

    yield begin
    for ledger in opened:
        ledger.close()


@pytest.fixture
def campaign(begin, tmp_path: Path) -> Callable[..., Story]:
    """A realistic search: it improves, now and then a trial fails or is answered from the cache."""

    def campaign(name: str = "matmul", trials: int = 60, **about: Any) -> Story:
        story, random = begin(name, **{"budget": trials} | about), Random(name)
        for n in range(trials):
            action, luck = action_of(random, n / trials), random.random()
            used = {"wall_s": 1 + random.random(), "user_s": 0.9, "system_s": 0.05, "max_rss_bytes": 3e7}
            if luck < 0.06:
                reason = "killed by signal 11 (SIGSEGV)"
                logs(tmp_path, name, story.tell(action, outcome=Outcome.CRASHED, reason=reason, usage=used).number)
            elif luck < 0.09:
                story.tell(action, outcome=Outcome.TIMEOUT, reason="timed out after 20 s", usage=used)
            elif action["tile"] > action["size"]:
                story.tell(action, outcome=Outcome.INFEASIBLE, reason="tile <= size does not hold")
            else:
                speed = gflops(action, random)
                metrics = {"gflops": speed, "seconds": 40 / speed}
                story.tell(action, speed, metrics=metrics, usage=used, cached_from="3" if luck > 0.95 else None)
        return story

    return campaign


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser that reports are tried in."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None and shutil.which("apt-get") is None:
        pytest.skip("neither chromium nor apt-get is here; install chromium by hand to run this")
    assert found, "chromium is missing: run `make setup`, or `apt-get install -y chromium`"
    return found


@dataclass(frozen=True)
class Rendered:
    dom: str
    log: str


@pytest.fixture
def render(chromium: str, tmp_path_factory) -> Callable[..., Rendered]:
    """Open a page in headless Chromium as a reader would, and give back what became of it."""

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
