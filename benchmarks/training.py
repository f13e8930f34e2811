"""Training: an update of GRPO against TRL's, the same model and sequences, each in a separate process.

TRL is measured with all rows at once and with four at a time, and each of its figures is the better one of the two.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from benchmarks.measure import Ratio

_ROUNDS = 2
_TRL = {"16 rows at once": "trl-16", "4 rows at a time": "trl-4"}


def measured(side: str) -> dict[str, Any]:
    """What one side took; the last line that it prints says it."""
    command = [sys.executable, "-m", "benchmarks.updates", side]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if process.returncode:
        raise RuntimeError(f"{side} failed: {process.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def run() -> list[Ratio]:
    """In turns, so that a disturbance meets all."""
    if find_spec("trl") is None:
        print("training: TRL is not installed (pip install 'loopwright[trl]'); not measured", file=sys.stderr)
        return []
    rounds = [{side: measured(side) for side in ("ours", *_TRL.values())} for _ in range(_ROUNDS)]
    norms = ", ".join(f"{results['norm']:.4g}" for results in rounds[0].values())
    seconds, peaks = (
        {side: min(results[side][figure] for results in rounds) for side in rounds[0]}
        for figure in ("seconds", "peak_bytes")
    )
    gib = {side: size / 2**30 for side, size in peaks.items()}
    return [
        _ratio("training: a GRPO update against TRL's", seconds, "s", 0.9, f"; norms of the first gradient: {norms}"),
        _ratio("training: its peak memory", gib, "GiB", 1.0),
    ]


def _ratio(name: str, figures: Mapping[str, float], unit: str, target: float, more: str = "") -> Ratio:
    theirs = " and ".join(f"{figures[side]:.2f} {unit} ({setting})" for setting, side in _TRL.items())
    best = min(figures[side] for side in _TRL.values())
    return Ratio(name, figures["ours"] / best, target, detail=f"{figures['ours']:.2f} {unit} against {theirs}{more}")
