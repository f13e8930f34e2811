"""TCP: the shipped example with env_params for three seeds, the policy's mean over the regimes beside the static one's.

Both are measured in the same run; the policy must be at least as good on every seed.
"""

import json
import runpy
import tempfile
from pathlib import Path
from statistics import fmean

from benchmarks.measure import Ratio
from loopwright.ledger.ledger import Ledger
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.load import load

EXAMPLE = Path(__file__).parents[1] / "examples" / "regimes" / "tcp.toml"
SEEDS = (1, 2, 3)


def run() -> list[Ratio]:
    """One ratio for each seed; none where the example cannot run."""
    if problem := runpy.run_path(str(EXAMPLE.with_suffix(".py")))["missing"]():
        print(f"skipped: {problem}")
        return []
    return [_beside(seed) for seed in SEEDS]


def _beside(seed: int) -> Ratio:
    with tempfile.TemporaryDirectory() as scratch:
        scenario, output = Path(scratch) / "tcp.toml", Path(scratch) / "out"
        text = EXAMPLE.read_text().replace("seed = 1", f"seed = {seed}")
        scenario.write_text(f"home = {json.dumps(str(EXAMPLE.parent))}\n{text}")
        assert dispatch(load(scenario), output) == 0
        with Ledger.read(output / "tcp-policy" / "ledger.db") as ledger:
            regimes = ledger.state("policy")["regimes"]
    policy, static = (fmean(row[who]["reward"] for row in regimes) for who in ("policy", "static"))
    name = f"tcp, seed {seed}: the policy's mean over {len(regimes)} regimes, against the best static action's"
    return Ratio(name, policy / static, 1.0, at_least=True, detail=f"{policy:.3f} and {static:.3f}")
