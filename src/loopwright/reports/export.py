"""Exports: a ledger as CSV and Parquet files, and the best configuration as a runnable scenario."""

import csv
import glob
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import orjson

from loopwright.core.errors import MissingExtra, storage
from loopwright.core.trial import Trial
from loopwright.ledger.ledger import Ledger
from loopwright.reports.formatting import exact
from loopwright.reports.objective import Objective
from loopwright.reports.search.headline import title
from loopwright.reports.search.trajectory import complete_columns, write_trajectory
from loopwright.selection.recommendation import Candidate, Recommendation, recommend
from loopwright.selection.trials import stored_trials
from loopwright.spaces.parameter import flat, nested


def write_csv(ledger: Ledger, directory: Path) -> list[Path]:
    """`trajectory.csv` and, where parameters are drawn, `env.csv`: the same trials in the same order."""
    names = list(ledger.state("run", {}).get("env_params", {}))
    trajectory, env = directory / "trajectory.csv", directory / "env.csv"
    if complete_columns(ledger, trajectory) is None:
        with replacing(trajectory) as file:
            write_trajectory(ledger, file)
    if not names:
        return [trajectory]
    with replacing(env) as file:
        rows = csv.writer(file)
        rows.writerow(("trial", *names))
        rows.writerows((trial.number, *(trial.regime.get(name) for name in names)) for trial in ledger.trials())
    return [trajectory, env]


def write_parquet(ledger: Ledger, path: Path) -> Path:
    """All trials as one table: a column per parameter, drawn value, metric and objective."""
    pa, pq = parquet_modules()
    rows = [flat_row(trial) for trial in ledger.trials()]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: _uniform([row.get(name) for row in rows]) for name in names}
    with replacement(path) as temporary:
        pq.write_table(pa.table(columns), temporary)
    return path


def parquet_modules() -> tuple[Any, Any]:
    """`pyarrow` and `pyarrow.parquet`; MissingExtra if they are not installed."""
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtra("Parquet export", "parquet") from error


def flat_row(trial: Trial) -> dict[str, Any]:
    """A trial as one row: a column per field, parameter, drawn value, metric and objective."""
    row: dict[str, Any] = {
        "trial": trial.number,
        "group": trial.group,
        "repeat": trial.repeat,
        "phase": trial.phase,
        "outcome": trial.outcome,
        "fault": trial.fault,
        "reason": trial.reason,
        "reward": None if trial.reward is None else trial.reward.value,
        "cached_from": trial.cached_from,
        "key": trial.key,
        "draw": trial.draw,
        "reserved_at": trial.reserved_at,
        "finished_at": trial.finished_at,
    }
    if trial.reward is not None and trial.reward.more:
        row |= {f"objective.{i}": value for i, value in enumerate(trial.reward.objectives)}
    for prefix, values in (
        ("action", trial.action),
        ("env_params", trial.regime),
        ("noise", trial.noise),
        ("metric", trial.metrics),
        ("usage", trial.usage),
    ):
        row |= {f"{prefix}.{name}": value for name, value in values.items()}
    return row


def _uniform(column: list[Any]) -> list[Any]:
    """A column of one type: a list of candidates may mix types, which Parquet cannot store."""
    kinds = {type(value) for value in column if value is not None}
    if kinds <= {int, float} and len(kinds) == 2:
        return [None if value is None else float(value) for value in column]
    if len(kinds) > 1 or kinds & {dict, list}:
        return [None if value is None else exact(value) for value in column]
    return column


def write_best(ledger: Ledger, path: Path, best: Recommendation | None = None) -> Path | None:
    """The best configuration as a scenario of plain runs: one, or one per regime, or one per point of the front.

    `best` spares reading the trials again.
    """
    source, run = ledger.state("source"), ledger.state("run", {})
    if source is None:
        return None
    best = best or recommend(stored_trials(ledger), run)
    candidates = best.by_regime if run.get("conditions_on_regime") else best.front
    runs = [_plain_run(source, candidate, regime) for candidate in candidates for regime in candidate.regimes]
    if not runs:
        path.unlink(missing_ok=True)  # of measurements that `reread` has replaced
        return None
    import tomli_w

    numbered = [table | {"name": f"{table['name']}-{i}"} for i, table in enumerate(runs, 1)] if len(runs) > 1 else runs
    labels = run.get("objectives") or ["reward"] * len(candidates[0].objectives)
    objectives = [Objective.of(label) for label in labels]
    name = f"{source['name']}: best of {run.get('name')}"
    system = {"system": source["system"]} if source["system"] else {}
    scenario = {"name": name, "home": source["home"], **system, "run": numbered}
    with replacing(path) as file:
        file.write("# The best configuration; run it with `loopwright run`.\n")
        for candidate in candidates:
            rewards = "; ".join(
                f"{own.name} = {own.value(value):g} ({own.evidence(interval, len(candidate.trials))})"
                for own, value, interval in zip(objectives, candidate.objectives, candidate.intervals, strict=True)
            )
            numbers = ", ".join(map(str, candidate.trials[:10]))
            trials = "trial" if len(candidate.trials) == 1 else "trials"
            file.write(f"# {title(candidate)}: {rewards}, in {trials} {numbers}\n")
        file.write(tomli_w.dumps(scenario))
    return path


def _plain_run(source: Mapping[str, Any], candidate: Candidate, regime: Mapping[str, Any]) -> dict[str, Any]:
    table = source["run"]
    workload = {key: value for key, value in table["workload"].items() if key not in ("args", "env", "constraints")}
    assigned = {**candidate.action, **regime}
    for part in ("args", "env"):
        specs = flat(table["workload"].get(part, {}))
        values = {name: _fixed_value(name, spec, assigned) for name, spec in specs.items()}
        workload[part] = nested({name: value for name, value in values.items() if value is not None})
    workload |= {"nodes": assigned["nodes"]} if "nodes" in workload and "nodes" in assigned else {}
    if not workload["env"]:
        del workload["env"]
    return {"name": table["name"], "workload": workload} | {
        key: table[key] for key in ("reward", "noise") if key in table
    }


def _fixed_value(name: str, spec: Any, assigned: Mapping[str, Any]) -> Any:
    """One argument as a fixed value, or as one that is absent."""
    if name in assigned:
        value = assigned[name]
    elif isinstance(spec, list):
        value = spec[0]
    elif isinstance(spec, dict) and "when" in spec and "otherwise" not in spec:
        # A command may name it, so it stays, with the condition that makes it absent.
        first = spec["values"][0] if "values" in spec else spec.get("value", spec.get("low"))
        return {"value": first, "when": spec["when"]}
    elif isinstance(spec, dict):
        value = spec.get("otherwise") if "when" in spec else spec.get("value")
    else:
        value = spec
    return {"value": value} if isinstance(value, (list, dict)) else value


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """One JSON object per line."""
    with replacement(path) as part, part.open("wb") as file:
        for row in rows:
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    return path


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Write a file completely or not at all."""
    with replacement(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        yield file


@contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """A file beside this one, to write to: it takes its place at the end, or is deleted after an exception.

    What processes that were killed left behind is deleted, too.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with storage(path):
        for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
            owner = leftover.name.removesuffix(".part").rpartition(".")[2]
            if not (owner.isdigit() and Path("/proc", owner).exists()):
                leftover.unlink(missing_ok=True)
        try:
            yield temporary
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
