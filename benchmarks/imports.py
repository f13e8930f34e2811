"""Imports: how long until the package is there, until the command line answers, and what stays unloaded."""

import subprocess
import sys
from pathlib import Path

from benchmarks.measure import Ratio, best_of

HEAVY = ("torch", "ray", "optuna", "pandas")
ROUNDS = 9
HELP = (str(Path(sys.executable).with_name("loopwright")), "--help")


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def run() -> list[Ratio]:
    """Wall time in fresh processes."""
    best = best_of(
        ROUNDS,
        {
            "nothing": lambda: python("pass"),
            "import": lambda: python("import loopwright"),
            "help": lambda: subprocess.run(HELP, capture_output=True, check=True),
        },
    )
    code = "import loopwright, sys; import loopwright.cli; print(*(m for m in {} if m in sys.modules))"
    loaded = python(code.format(HEAVY)).split()
    bare = f"{best['nothing']:.3f} s of it Python's own start"
    return [
        Ratio("imports: import loopwright", best["import"], 0.3, unit="s", detail=bare),
        Ratio("imports: loopwright --help", best["help"], 0.6, unit="s", detail=bare),
        Ratio(f"imports: of {', '.join(HEAVY)}", len(loaded), 0, unit="loaded", detail=" ".join(loaded)),
    ]
