"""Selection: whether a recommendation keeps its word, and whether samplers leave regions that fail.

Each noisy example is searched with 20 seeds. The recommendation is then measured 20 more times: it is worse than stated
if the mean of these is below its interval. The luckiest trial has no interval; its claim is worse than stated if the
mean of 20 is below it.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

import loopwright
from benchmarks.measure import Ratio

SEEDS, TRIALS, AGAIN = 20, 100, 20
CRASHING_TRIALS, LAST = 100, 30


@dataclass(frozen=True)
class Example:
    """A function with noise. `measure` gets the arguments and a source of noise."""

    name: str
    space: Mapping[str, Any]
    measure: Callable[[Mapping[str, Any], Random], float]


def _bowl(point: Mapping[str, Any]) -> float:
    return float(10 - (point["x"] - 3) ** 2 - 0.5 * (point["y"] - 1) ** 2)


def _throughput(point: Mapping[str, Any], noise: Random) -> float:
    """Like a server on a shared machine: multiplicative noise that differs between modes, and stalls."""
    speed = 60_000 + 20_000 * point["threads"] ** 0.5 - (4_000 * point["threads"] if point["lock"] == "spin" else 0)
    stall = 0.5 if noise.random() < 0.1 else 1.0
    return float(speed) * stall * noise.lognormvariate(0, 0.15 if point["lock"] == "spin" else 0.05)


EXAMPLES = (
    Example(
        "even noise",
        {"x": loopwright.uniform(0, 6), "y": loopwright.uniform(-3, 5)},
        lambda point, noise: _bowl(point) + noise.gauss(0, 1),
    ),
    Example(
        "uneven noise",
        {"x": loopwright.uniform(0, 6), "y": loopwright.uniform(-3, 5), "mode": ["calm", "wild"]},
        lambda point, noise: _bowl(point) + noise.gauss(0, 3 if point["mode"] == "wild" else 0.5),
    ),
    Example("server", {"threads": [1, 2, 4, 8, 16], "lock": ["spin", "futex"], "batch": [1, 8, 64]}, _throughput),
)


def _search(example: Example, seed: int) -> tuple[bool, bool, float, float]:
    """Whether recommendation and luckiest trial were worse than stated, the luckiest's shortfall, and the cost."""
    noise = Random(f"{example.name}:{seed}")

    def measure(**point: Any) -> float:
        return example.measure(point, noise)

    with tempfile.TemporaryDirectory() as directory:
        agent = "tpe" if seed % 2 else "random"
        study = loopwright.tune(
            measure,
            example.space,
            maximize=True,
            trials=TRIALS,
            agent=agent,
            seed=seed,
            output=Path(directory, "out"),
            in_process=True,
            progress=False,
        )
        best, trials = study.best, study.trials()
    assert best.interval is not None
    again = fmean(example.measure(best.params, noise) for _ in range(AGAIN))
    searched = [trial for trial in trials if not trial.phase]
    lucky = max(searched, key=lambda trial: trial.reward.value if trial.reward else float("-inf"))
    claim = lucky.metrics["value"]
    lucky_again = fmean(example.measure(lucky.action, noise) for _ in range(AGAIN))
    cost = 1 - len(searched) / TRIALS
    return again < best.interval[0], lucky_again < claim, (claim - lucky_again) / abs(claim), cost


def _crashes(seed: int) -> int:
    """How many of the last trials crash where half of the space does, and the function improves towards that half."""

    def measure(x: float, y: float, z: int) -> float:
        if x > 0.5:
            raise ValueError("out of memory")
        return x - (y - 0.3) ** 2 - 0.1 * z

    with tempfile.TemporaryDirectory() as directory:
        study = loopwright.tune(
            measure,
            {"x": loopwright.uniform(0, 1), "y": loopwright.uniform(0, 1), "z": [0, 1, 2]},
            maximize=True,
            trials=CRASHING_TRIALS,
            seed=seed,
            output=Path(directory, "out"),
            in_process=True,
            progress=False,
        )
        searched = [trial for trial in study.trials() if not trial.phase]
    return sum(trial.outcome != "ok" for trial in searched[-LAST:])


def run() -> Iterator[Ratio]:
    """All figures."""
    results = {example.name: [_search(example, seed) for seed in range(SEEDS)] for example in EXAMPLES}
    rows = [row for group in results.values() for row in group]
    detail = ", ".join(f"{name} {sum(row[0] for row in group)} of {SEEDS}" for name, group in results.items())
    yield Ratio("recommendation worse than its interval", 100 * fmean(row[0] for row in rows), 5, "%", detail=detail)
    yield Ratio(
        "luckiest trial worse than its claim",
        100 * fmean(row[1] for row in rows),
        None,
        "%",
        detail=f"median shortfall {100 * median(row[2] for row in rows):.3g} % of the claim",
    )
    yield Ratio("trials used by the selection", 100 * max(row[3] for row in rows), 25, "%")
    crashes = [_crashes(seed) for seed in range(5)]
    yield Ratio(
        f"tpe: crashes in the last {LAST} trials, half of the space fails",
        100 * max(crashes) / LAST,
        20,
        "%",
        detail=f"5 seeds: {', '.join(map(str, crashes))}",
    )
