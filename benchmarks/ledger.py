"""The ledger: what a trial costs, and that it costs the same after a hundred thousand of them."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measure import Ratio, best_of
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Result, Reward, Trial, key_of
from loopwright.ledger.ledger import Ledger

FEW, MANY = 1_000, 100_000
BATCH = 1_000
ROUNDS = 9


class Filling:
    """A ledger that grows; each trial has a new key, as in a search."""

    def __init__(self, path: Path) -> None:
        self.ledger, self.number = Ledger.create(path), 0

    def add(self, count: int = BATCH) -> None:
        """Reserve, look up without a hit, and commit this many trials."""
        for number in range(self.number + 1, self.number + count + 1):
            action = {"tile": number, "opt": "-O3 -march=native", "threads": 2}
            trial = Trial(number, action, key_of(action, {}, "fingerprint", 0), group=number, reserved_at=time.time())
            self.ledger.reserve([trial])
            assert self.ledger.find(trial.key) is None
            reward = Reward(number * 0.5, {"gflops": number * 0.5})
            usage = {"wall_s": 0.1, "user_s": 0.1}
            self.ledger.commit(trial, Result(Outcome.OK, {"gflops": number * 0.5}, usage=usage, reward=reward))
        self.number += count


@contextmanager
def fillings() -> Iterator[tuple[Filling, Filling]]:
    """A small ledger and a large one, side by side on one disk."""
    with tempfile.TemporaryDirectory() as directory:
        few, many = Filling(Path(directory, "few.db")), Filling(Path(directory, "many.db"))
        few.add(FEW)
        many.add(MANY)
        with few.ledger, many.ledger:
            yield few, many


def run() -> list[Ratio]:
    """The cost per trial at 1,000 trials and at 100,000, measured in turns."""
    with fillings() as (few, many):
        best = best_of(ROUNDS, {"few": few.add, "many": many.add})
    few_ms, many_ms = best["few"] / BATCH * 1000, best["many"] / BATCH * 1000
    detail = f"{few_ms:.3f} ms at {FEW:,}, {many_ms:.3f} ms at {MANY:,}"
    return [
        Ratio(f"ledger: a trial at {MANY:,} against one at {FEW:,}", many_ms / few_ms, 1.5, detail=detail),
        Ratio(f"ledger: a trial at {MANY:,}", many_ms, 0.2, unit="ms"),
    ]
