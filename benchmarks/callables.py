"""Callables: `random` over a Python function, against Optuna's own ask/tell loop with each of its storages."""

import tempfile
import warnings
from pathlib import Path

import optuna

from benchmarks.function import bowl
from benchmarks.measure import Ratio, best_of
from benchmarks.spine import campaigns

TRIALS, PARALLEL = 2_000, 2
FEW = 200
ROUNDS = 5
SCENARIO = """
name = "bowl"
[system]
parallel = {parallel}
[[run]]
name = "bowl"
agent = {{ type = "random", trials = {trials}, seed = 1 }}
reward = {{ type = "negative", metrics = ["loss"] }}
[run.workload]
type = "python"
function = "function:bowl"
path = ["{path}"]
[run.workload.args]
x = {{ low = -2.0, high = 2.0 }}
y = {{ low = -2.0, high = 2.0 }}
z = {{ low = 0.0, high = 10.0 }}
"""


def scenario(trials: int) -> str:
    return SCENARIO.format(parallel=PARALLEL, trials=trials, path=Path(__file__).parent)


def ask_and_tell(trials: int, storage: optuna.storages.BaseStorage | None) -> None:
    """A bare Optuna loop that calls the same function."""
    study = optuna.create_study(storage=storage, sampler=optuna.samplers.RandomSampler(seed=1))
    for _ in range(trials):
        trial = study.ask()
        x, y = trial.suggest_float("x", -2, 2), trial.suggest_float("y", -2, 2)
        study.tell(trial, bowl(x, y, trial.suggest_float("z", 0, 10))["loss"])


def in_memory() -> None:
    ask_and_tell(TRIALS, None)


def in_sqlite() -> None:
    with tempfile.TemporaryDirectory() as directory:
        ask_and_tell(FEW, optuna.storages.RDBStorage(f"sqlite:///{directory}/study.db"))


def in_journal() -> None:
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        file = optuna.storages.journal.JournalFileBackend(f"{directory}/study.log")
        ask_and_tell(FEW, optuna.storages.JournalStorage(file))


def run() -> list[Ratio]:
    """The whole spine, durable and killable, against what Optuna does in memory, in SQLite and in its journal."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with campaigns(scenario(TRIALS), TRIALS) as campaign:
        in_memory()
        best = best_of(ROUNDS, {"ours": campaign, "memory": in_memory})
    with campaigns(scenario(FEW), FEW) as campaign:
        few = best_of(3, {"ours": campaign, "sqlite": in_sqlite, "journal": in_journal})
    many_ms = {name: taken / TRIALS * 1000 for name, taken in best.items()}
    few_ms = {name: taken / FEW * 1000 for name, taken in few.items()}
    ours = f"{many_ms['ours']:.3f} ms a trial"
    return [
        Ratio(
            "callables: against Optuna in memory",
            many_ms["ours"] / many_ms["memory"],
            2,
            detail=f"{ours}, Optuna {many_ms['memory']:.3f} ms",
        ),
        *(
            Ratio(
                f"callables: faster than Optuna with {name}",
                few_ms[key] / many_ms["ours"],
                target,
                at_least=True,
                detail=f"{ours}, Optuna {few_ms[key]:.3f} ms",
            )
            for key, name, target in (("sqlite", "SQLite", 30), ("journal", "its journal file", 4))
        ),
    ]
