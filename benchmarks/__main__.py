"""`python -m benchmarks [name ...]`: measure, show, and exit with 1 if a target is missed."""

import signal
import sys
from compileall import compile_dir
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Ratio

NAMES = (
    "imports",
    "ledger",
    "selection",
    "commands",
    "callables",
    "slurm",
    "ray_trials",
    "stopping",
    "race",
    "sockets",
    "live",
    "paddle",
    "tcp",
    "pools",
    "rollouts",
    "export",
    "environments",
    "sandbox",
    "engines",
    "gateway",
    "bodies",
    "training",
)
LONG = ("large", "scale", "training-demo")
"""Run by name only: they take longer than all others together."""


def main(names: list[str]) -> int:
    """Run the benchmarks of these names, or all but the long ones."""
    if unknown := [name for name in names if name not in (*NAMES, *LONG)]:
        print(f"unknown benchmark {unknown[0]!r}. Choose among: {', '.join((*NAMES, *LONG))}.", file=sys.stderr)
        return 2
    # As pip does with the peers: otherwise each fresh interpreter, such as a worker, compiles ours before it starts.
    compile_dir(Path(__file__).parents[1] / "src", quiet=1)
    ratios: list[Ratio] = []
    for name in names or NAMES:
        for ratio in import_module(f"benchmarks.{name.replace('-', '_')}").run():
            print(ratio, flush=True)
            ratios.append(ratio)
    show(ratios)
    return 0 if all(ratio.passed for ratio in ratios) else 1


def show(ratios: list[Ratio]) -> None:
    """All figures in one table."""
    table = Table("benchmark", "measured", "target", "", "detail")
    for ratio in ratios:
        mark = "[green]pass[/]" if ratio.passed else "[red]FAIL[/]"
        table.add_row(ratio.name, f"{ratio.value:.3g} {ratio.unit}", ratio.goal, mark, ratio.detail)
    Console().print(table)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes are ended
    sys.exit(main(sys.argv[1:]))
