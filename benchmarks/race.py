"""Race: how many steps per second an agent takes on a replayed campaign of 2,000 trials."""

import tempfile
import time
from collections.abc import Iterator
from math import cos
from pathlib import Path

import loopwright
from benchmarks.measure import Ratio
from loopwright.agents.search.race import race
from loopwright.envs.replay import Recording

TRIALS, STEPS, ROUNDS = 2000, 2000, 3
SPACE = {
    "x": loopwright.uniform(0, 6),
    "lr": loopwright.log(1e-5, 1e-1),
    "layers": [1, 2, 4, 8],
    "mode": ["a", "b", "c"],
}


def _measure(x: float, lr: float, layers: int, mode: str) -> float:
    return float(cos(x) - abs(lr - 0.01) + layers / 10 + (mode == "b"))


def run() -> Iterator[Ratio]:
    """`random`, which proposes points that were never measured: every answer is the model's."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "out"
        loopwright.tune(
            _measure, SPACE, maximize=True, trials=TRIALS, agent="random", seed=1, output=output, in_process=True
        )
        recording = Recording.read(output)
        speeds = []
        for _ in range(ROUNDS):
            started_s = time.process_time()  # of a shared machine, only our share
            race(recording, ["random"], seeds=1, trials=STEPS)
            speeds.append(STEPS / (time.process_time() - started_s))
    detail = f"`random` on {TRIALS:,} recorded trials; every answer is the model's; processor time, best of {ROUNDS}"
    yield Ratio("race: steps", max(speeds), 2000, "/s", at_least=True, detail=detail)
