"""Callables: `random` over a Python function, against Optuna's own ask/tell loop with each of its storages."""

import tempfile
import warnings
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from benchmarks.function import bowl
from benchmarks.measure import Ratio, best_of
from benchmarks.spine import campaigns

TRIALS, PARALLEL = 2_000, 2
FEW = 500
ROUNDS = 4
SCENARIO = """
name = "bowl"
[system]
parallel = {parallel}
[[run]]
name = "bowl"
agent = {{ type = "random", trials = {trials}, seed = 1 }}
confirm = false
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


def ask_and_tell(trials: int, storage: BaseStorage | None) -> None:
    """A bare Optuna loop that calls the same function."""
    study = optuna.create_study(storage=storage, sampler=optuna.samplers.RandomSampler(seed=1))
    for _ in range(trials):
        trial = study.ask()
        x, y = trial.suggest_float("x", -2, 2), trial.suggest_float("y", -2, 2)
        study.tell(trial, bowl(x, y, trial.suggest_float("z", 0, 10))["loss"])


def in_memory() -> None:
    ask_and_tell(TRIALS, None)


def in_journal() -> None:
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        ask_and_tell(TRIALS, JournalStorage(JournalFileBackend(f"{directory}/study.log")))


def in_sqlite() -> None:
    with tempfile.TemporaryDirectory() as directory:
        ask_and_tell(FEW, RDBStorage(f"sqlite:///{directory}/study.db"))


def run() -> list[Ratio]:
    """The whole spine, durable and killable, against what Optuna does in memory, in its journal and in SQLite.

    Both sides always make the same number of trials, starting and ending included: fewer with SQLite, which is slow,
    so that our workers' start weighs more there. Where Optuna writes to disk, so do we; where it writes nothing, we
    write to memory, so that the ratio is about us and not about the disk.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with campaigns(scenario(TRIALS), TRIALS) as campaign:
        campaign()
        light = best_of(ROUNDS, {"ours": campaign, "memory": in_memory})
    with campaigns(scenario(TRIALS), TRIALS, on_disk=True) as campaign:
        many = best_of(ROUNDS, {"ours": campaign, "journal": in_journal})
    with campaigns(scenario(FEW), FEW, on_disk=True) as campaign:
        campaign()
        few = best_of(3, {"ours": campaign, "sqlite": in_sqlite})
    name = f"callables, {TRIALS:,} trials:"
    return [
        Ratio(
            f"{name} against Optuna in memory",
            light["ours"] / light["memory"],
            2,
            detail=_per_trial(light, "memory", TRIALS),
        ),
        Ratio(
            f"{name} faster than Optuna with its journal file",
            many["journal"] / many["ours"],
            4,
            at_least=True,
            detail=_per_trial(many, "journal", TRIALS),
        ),
        Ratio(
            f"callables, {FEW:,} trials: faster than Optuna with SQLite",
            few["sqlite"] / few["ours"],
            30,
            at_least=True,
            detail=_per_trial(few, "sqlite", FEW),
        ),
    ]


def _per_trial(times: dict[str, float], peer: str, trials: int) -> str:
    return f"{times['ours'] / trials * 1000:.3f} ms a trial, Optuna {times[peer] / trials * 1000:.3f} ms"
