"""Ledgers like those of real runs, written with the real ledger."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import orjson

from loopwright.core.outcome import Fault, Outcome
from loopwright.core.trial import Phase, Result, Reward, Trial, key_of
from loopwright.ledger.ledger import Ledger

SPACE = {
    "opt": ["-O0", "-O2", "-O3 -march=native"],
    "tile": {"low": 8, "high": 256, "dtype": "int", "log": True},
    "learning_rate": {"low": 0.0, "high": 1.0},
    "size": [256, 512],
    "OMP_NUM_THREADS": [1, 2, 4, 8],
    "input": "matrix.bin",
}


@dataclass
class FakeRun:
    """One run: `add` records a finished trial, `start` leaves one in flight."""

    ledger: Ledger
    number: int = 0

    def add(
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
        phase: Phase = "",
    ) -> Trial:
        trial = self.start(action, regime=regime, group=group, repeat=repeat, phase=phase)
        reward = Reward(rewards[0], {}, rewards[1:]) if rewards else None
        return self.ledger.commit(
            trial, Result(outcome, metrics or {}, reason, fault, usage or {}, cached_from, reward)
        )

    def start(self, action, *, regime=None, group=None, repeat=0, phase: Phase = "") -> Trial:
        self.number += 1
        key = key_of(action, regime or {}, "fingerprint", repeat)
        trial = Trial(
            number=self.number,
            phase=phase,
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
    """A point as a search would propose it, approaching the best."""
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


def live(
    ledger: Ledger, episodes: Sequence[Mapping[str, Any]], *, steps: bool = True, failed: Sequence[int] = ()
) -> None:
    """A live run: episodes as {"return", "length", "regime"}, and their steps with the last one of some failing."""
    number = 0
    for place, episode in enumerate(episodes, 1):
        first, number = number + 1, number + int(episode["length"])
        regime = orjson.dumps(episode.get("regime", {})).decode()
        rows = [
            (n, place, "1", place, regime, "ok", None, "", 1.0, '{"parts":{},"more":[]}', "{}", 1e9 + n, 1e9 + n)
            for n in (range(first, number + 1) if steps else [number])
        ]
        if place in failed:
            bad = ("metric_missing", "workload", "the server gave the reward nan", None, None)
            rows[-1] = (*rows[-1][:5], *bad, *rows[-1][10:])
        facts = {"episode": place, "first": first, "last": number, "truncated": False, "regime": {}, **episode}
        ledger.append(rows, [(number, orjson.dumps(facts))])


LIVE = {
    "agent": {"type": "ppo", "trials": 20000, "seed": 1},
    "live": True,
    "objectives": ["server"],
    "metrics": ["observation"],
    "parameters": {"ball_speed": [1.0, 1.5, 2.0]},
    "workload": {"type": "live", "env_class": "paddle:PaddleServer"},
    "constraints": [],
}
