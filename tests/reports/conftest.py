"""Ledgers as runs leave them behind, written with the real ledger."""

import math
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from loopwright.core.canonical import key_of
from loopwright.core.ledger import Ledger
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.reward import Reward
from loopwright.core.trial import Result, Trial

SPACE = {
    "opt": ["-O0", "-O2", "-O3 -march=native"],
    "tile": {"low": 8, "high": 256, "dtype": "int", "log": True},
    "learning_rate": {"low": 0.0, "high": 1.0},
    "size": [256, 512],
    "OMP_NUM_THREADS": [1, 2, 4, 8],
    "input": "matrix.bin",
}


@dataclass
class Story:
    """One run being told: `tell` ends a trial, `hang` leaves one in flight."""

    ledger: Ledger
    number: int = 0

    def tell(
        self,
        action: Mapping[str, Any],
        *rewards: float,
        regime: Mapping[str, Any] | None = None,
        group: int | None = None,
        repeat: int = 0,
        outcome: Outcome = Outcome.OK,
        reason: str = "",
        fault: Fault | None = None,
        metrics: Mapping[str, float] | None = None,
        usage: Mapping[str, float] | None = None,
        cached_from: str | None = None,
    ) -> Trial:
        trial = self.hang(action, regime=regime, group=group, repeat=repeat)
        result = Result(outcome, metrics or {}, reason, fault, usage or {}, cached_from)
        return self.ledger.commit(trial, result, Reward(rewards[0], {}, rewards[1:]) if rewards else None)

    def hang(self, action, *, regime=None, group=None, repeat=0) -> Trial:
        self.number += 1
        key = key_of(action, regime or {}, "fingerprint", repeat)
        trial = Trial(
            number=self.number,
            action=action,
            key=key,
            group=group or self.number,
            repeat=repeat,
            draw=self.number if regime else None,
            regime=regime or {},
            reserved_at=time.time(),
        )
        self.ledger.reserve([trial])
        return trial


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


def describe(ledger: Ledger, name: str, **about: Any) -> None:
    run = {
        "name": name,
        "agent": {"type": "tpe", "trials": 60, "seed": 7},
        "objectives": ["gflops"],
        "metrics": ["gflops", "seconds"],
        "parameters": SPACE,
        "env_params": {},
        "constraints": ["tile <= size"],
        "workload": {"type": "command", "command": "./bench --tile {tile} --size {size}", "timeout_s": 20},
        "fingerprint": "0f3a5c",
        "budget": None,
        "repeats": 1,
        "parallel": 2,
        "conditions_on_regime": False,
    }
    ledger.set_state("run", run | about)
    ledger.set_state(
        "provenance",
        {
            "loopwright": "0.1.0",
            "python": "3.11.9",
            "platform": "Linux-6.1-x86_64",
            "host": "node17",
            "cpus": 16,
            "memory_bytes": 64 * 2**30,
            "scenario": "/home/ada/matmul-flags.toml",
            "started_at": 1_750_000_000.0,
            "git": "4f2a91c",
        },
    )


def action_of(random: Random, progress: float = 0.0) -> dict[str, Any]:
    """A point as a search would propose it: ever nearer to the best."""
    tile = round(2 ** (3 + 5 * (random.random() * (1 - progress) + 0.7 * progress)))
    opt = "-O3 -march=native" if random.random() < 0.3 + 0.6 * progress else random.choice(SPACE["opt"])
    return {
        "opt": opt,
        "tile": tile,
        "learning_rate": round(random.random() * (1 - 0.6 * progress), 4),
        "size": random.choice([256, 512]),
        "OMP_NUM_THREADS": random.choice([1, 2, 4, 8]),
        "input": "matrix.bin",
    }


def gflops(action: Mapping[str, Any], random: Random) -> float:
    """A made-up benchmark with an optimum inside the space."""
    speed = {"-O0": 2.0, "-O2": 11.0}.get(action["opt"], 21.0)
    tile = math.exp(-((math.log2(action["tile"]) - 6.2) ** 2) / 3)
    return speed * (0.3 + tile) * action["OMP_NUM_THREADS"] ** 0.6 * (1 + 0.03 * random.gauss(0, 1))


def logs(output: Path, run: str, number: int) -> None:
    folder = output / run / "trials" / str(number)
    folder.mkdir(parents=True)
    (folder / "stdout").write_text("hello\n")
    (folder / "stderr").write_text("Segmentation fault\n")


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
                story.tell(action, outcome=Outcome.TIMEOUT, reason="it was ended after 20 s", usage=used)
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
