"""Training demo: what `make demo-train` reaches, for five seeds: held-out reward before and after, time, overhead."""

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from benchmarks.measure import Ratio
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import rollouts
from loopwright.ledger.steps import steps
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.load import load

EXAMPLE = Path(__file__).parents[1] / "examples" / "train" / "shell.toml"
SEEDS = range(1, 6)
RISE, MINUTES, OVERHEAD_MS = 0.4, 5.0, 300.0
_OWN = ("boot", "collect", "teardown")
"""The phases of a trial that are neither the agent's nor the tests': session, sandbox, collection."""


@dataclass(frozen=True)
class Trained:
    """What became of one seed."""

    before: float
    after: float
    minutes: float
    """From the first rollout to the last, evaluations included."""
    phases_ms: dict[str, float]
    """The mean of each phase over all trials."""
    overhead_ms: float
    """The median over all trials."""


def run() -> Iterator[Ratio]:
    """Each seed by itself; figures are shown as they come."""
    for seed in SEEDS:
        result = train(seed)
        change = f"{result.before:.2f} → {result.after:.2f} on held-out tasks"
        phases = ", ".join(f"{name} {phase_ms:.0f}" for name, phase_ms in sorted(result.phases_ms.items()))
        name = f"training demo, seed {seed}"
        yield Ratio(f"{name}: rise of the reward", result.after - result.before, RISE, "", at_least=True, detail=change)
        yield Ratio(f"{name}: time", result.minutes, MINUTES, "min")
        yield Ratio(f"{name}: sandbox, session and collection", result.overhead_ms, OVERHEAD_MS, "ms", detail=phases)


def train(seed: int) -> Trained:
    """Train with this seed, in a directory that is removed."""
    with tempfile.TemporaryDirectory() as scratch:
        scenario, output = Path(scratch) / "shell.toml", Path(scratch) / "out"
        text = EXAMPLE.read_text().replace("seed = 1", f"seed = {seed}")
        scenario.write_text(f"home = {json.dumps(str(EXAMPLE.parent))}\n{text}")
        start = time.monotonic()
        if dispatch(load(scenario), output) != 0:
            raise RuntimeError(f"training with seed {seed} failed")
        minutes = (time.monotonic() - start) / 60
        with Ledger.read(output / "shell" / "ledger.db") as ledger:
            rewards = [step.numbers["reward"] for step in steps(ledger, "eval")]
            phases = [rollout.episode.attempts[-1].phases_s for rollout in rollouts(ledger)]
    means = {name: 1000 * fmean(one.get(name, 0.0) for one in phases) for name in {n for one in phases for n in one}}
    overhead_ms = 1000 * median(sum(one.get(name, 0.0) for name in _OWN) for one in phases)
    return Trained(rewards[0], rewards[-1], minutes, means, overhead_ms)
