"""Stopping early: `asha` over the learning curves of `examples/stopping`, against the same search without a rule.

Compute is counted in epochs, so that a busy machine does not matter. Optuna's own Hyperband runs over the same points.
With `tpe` the points depend on what was stopped, so its figures are those of another search, and have no target.
"""

import os
import sys
import tempfile
import tomllib
import warnings
from pathlib import Path
from statistics import median

import optuna
import orjson

import loopwright
from benchmarks.measure import Ratio
from loopwright.ledger.ledger import Ledger

EXAMPLE = Path(__file__).parent.parent / "examples" / "stopping"
SCENARIO = tomllib.loads((EXAMPLE / "spirals.toml").read_text())
EPOCHS, SEEDS = 81, 10


def search(seed: int, *, stops: bool, agent: str = "random") -> tuple[float, int, dict[int, list[float]]]:
    """The best loss, the epochs that were spent, and each trial's losses."""
    (shipped,) = SCENARIO["run"]
    run = shipped | {
        "agent": shipped["agent"] | {"type": agent, "seed": seed},
        "confirm": False,  # the rule alone is compared, at the same points
        "workload": shipped["workload"] | {"path": [str(EXAMPLE)]},
    }
    if not stops:
        del run["stop"]
    scenario = SCENARIO | {"run": [run]}
    with tempfile.TemporaryDirectory() as directory:
        study = loopwright.run(scenario, directory, progress=False)
        with Ledger.read(Path(directory) / "spirals" / "ledger.db") as ledger:
            curves = {number: orjson.loads(data) for number, data in ledger.payloads("curve")}
        losses = {number: curve["metrics"]["loss"] for number, curve in curves.items()}
        return study.best.value, sum(map(len, losses.values())), losses


def hyperband(losses: dict[int, list[float]]) -> tuple[float, int]:
    """Optuna's Hyperband over the same points: the best loss, and the epochs that were spent."""
    study = optuna.create_study(pruner=optuna.pruners.HyperbandPruner(1, EPOCHS, 3))
    epochs = 0
    for number in sorted(losses):
        trial, stopped = study.ask(), False
        for step, loss in enumerate(losses[number], 1):
            epochs += 1
            trial.report(loss, step)
            if stopped := trial.should_prune():
                break
        study.tell(trial, state=optuna.trial.TrialState.PRUNED) if stopped else study.tell(trial, losses[number][-1])
    return study.best_value, epochs


def run() -> list[Ratio]:
    """Both over several seeds."""
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    gaps: dict[str, list[float]] = {"asha": [], "asha with tpe": [], "Hyperband": []}
    shares: dict[str, list[float]] = {name: [] for name in gaps}
    for seed in range(SEEDS):
        best, epochs, losses = search(seed, stops=False)
        adaptive = search(seed, stops=False, agent="tpe")
        for name, (loss, spent), full in (
            ("asha", search(seed, stops=True)[:2], (best, epochs)),
            ("asha with tpe", search(seed, stops=True, agent="tpe")[:2], adaptive[:2]),
            ("Hyperband", hyperband(losses), (best, epochs)),
        ):
            gaps[name].append(100 * (loss / full[0] - 1))
            shares[name].append(100 * spent / full[1])
        figures = "; ".join(f"{name} {gaps[name][-1]:.2f}, {shares[name][-1]:.1f}" for name in gaps)
        print(f"seed {seed}: gap and compute in %: {figures}", file=sys.stderr)
    detail = f"median of {SEEDS} seeds, {SCENARIO['run'][0]['agent']['trials']} trials of {EPOCHS} epochs"
    return [
        Ratio("stopping: asha's best against the full search's", median(gaps["asha"]), 1, "% worse", detail=detail),
        Ratio("stopping: asha's compute", median(shares["asha"]), 35, "% of the full search's", detail=detail),
        Ratio("stopping: asha with tpe, best", median(gaps["asha with tpe"]), None, "% worse", detail=detail),
        Ratio("stopping: asha with tpe, compute", median(shares["asha with tpe"]), None, "%", detail=detail),
        Ratio("stopping: Optuna's Hyperband, best", median(gaps["Hyperband"]), None, "% worse", detail=detail),
        Ratio("stopping: Optuna's Hyperband, compute", median(shares["Hyperband"]), None, "%", detail=detail),
    ]
