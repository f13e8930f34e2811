"""Training: an update of GRPO against TRL's, the same model and sequences, each in a process of its own."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

from benchmarks.measure import Ratio

_ROUNDS = 1


def measured(side: str) -> dict[str, Any]:
    """What one side took; the last line that it prints says it."""
    command = [sys.executable, "-m", "benchmarks.updates", side]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if ended.returncode:
        raise RuntimeError(f"{side} failed: {ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def run() -> list[Ratio]:
    """In turns, so that a disturbance meets both."""
    if find_spec("trl") is None:
        print("training: TRL is not installed (pip install 'loopwright[trl]'); not measured", file=sys.stderr)
        return []
    rounds = [(measured("ours"), measured("trl")) for _ in range(_ROUNDS)]
    ours, theirs = (min((pair[side] for pair in rounds), key=lambda one: one["seconds"]) for side in (0, 1))
    taken = f"{ours['seconds']:.2f} s against {theirs['seconds']:.2f} s"
    norms = f"norms of the first gradient: {ours['norm']:.4g} and {theirs['norm']:.4g}"
    peaks = [one["peak_bytes"] / 2**30 for one in (ours, theirs)]
    return [
        Ratio(
            "training: a GRPO update against TRL's",
            ours["seconds"] / theirs["seconds"],
            0.9,
            detail=f"{taken}; {norms}",
        ),
        Ratio(
            "training: its peak memory",
            peaks[0] / peaks[1],
            1.0,
            detail=f"{peaks[0]:.2f} GiB against {peaks[1]:.2f} GiB",
        ),
    ]
