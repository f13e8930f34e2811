"""Paddle: PPO on the shipped live example, whether each of five seeds reaches the return that the example states."""

import json
import tempfile
from pathlib import Path
from statistics import fmean

from benchmarks.measure import Ratio
from loopwright.ledger.ledger import Ledger
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.load import load

EXAMPLE = Path(__file__).parents[1] / "examples" / "live" / "paddle.toml"
SEEDS = range(1, 6)
STATED, EPISODES = 6.0, 100


def run() -> list[Ratio]:
    """The mean return of the last episodes of each seed, within the steps that the example gives it."""
    return [
        Ratio(
            f"paddle, seed {seed}: mean return of the last {EPISODES} episodes",
            _trained(seed),
            STATED,
            "points",
            at_least=True,
        )
        for seed in SEEDS
    ]


def _trained(seed: int) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        scenario, output = Path(scratch) / "paddle.toml", Path(scratch) / "out"
        text = EXAMPLE.read_text().replace("seed = 1", f"seed = {seed}")
        scenario.write_text(f"home = {json.dumps(str(EXAMPLE.parent))}\n{text}")
        assert dispatch(load(scenario), output) == 0
        with Ledger.read(output / "paddle" / "ledger.db") as ledger:
            return fmean([episode["return"] for episode in ledger.episodes()][-EPISODES:])
