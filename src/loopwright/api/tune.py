"""`tune` and `run`: a search over a Python function, and what `loopwright run` does, as Python calls."""

import asyncio
import re
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from loopwright.api.shipping import code_digest, import_path, search_path, write_pickle
from loopwright.api.study import Study
from loopwright.core.errors import LedgerError
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.load import LoadedScenario, load
from loopwright.scenario.output import reopen
from loopwright.scenario.signals import Signals
from loopwright.workloads.base import Site, Workload, WorkloadConfig
from loopwright.workloads.in_process import FunctionWorkload


def log(low: float, high: float) -> dict[str, Any]:
    """A continuous range on a logarithmic scale, such as a learning rate."""
    return {"low": low, "high": high, "log": True}


def uniform(low: float, high: float) -> dict[str, Any]:
    """A continuous range."""
    return {"low": low, "high": high}


def integer(low: int, high: int, *, log: bool = False) -> dict[str, Any]:
    """A range of whole numbers, both ends included."""
    return {"low": low, "high": high, "dtype": "int", "log": log}


def tune(
    function: Callable[..., Any],
    space: Mapping[str, Any],
    *,
    minimize: str | bool | None = None,
    maximize: str | bool | None = None,
    trials: int,
    parallel: int = 1,
    output: str | Path | None = None,
    agent: str | Mapping[str, Any] = "tpe",
    seed: int = 0,
    repeats: int = 1,
    timeout_s: float | None = None,
    constraints: Sequence[str] = (),
    in_process: bool = False,
) -> Study:
    """Search the space for the best arguments of a function, and return the study.

        study = tune(train, {"lr": log(1e-5, 1e-1), "layers": [1, 2, 4]}, minimize="loss", trials=100)

    `function` gets keyword arguments and returns a dict of metrics, or one number (then pass `minimize=True` or
    `maximize=True`). A list is a choice, `log`, `uniform` and `integer` are ranges, anything else is fixed.

    The function runs in worker processes, which enforce `timeout_s` and survive its crashes, if it can be imported or
    pickled. Otherwise, or with `in_process=True`, it runs in threads of this process, without a timeout.

    Without `output` the study gets a new directory under `out/`. Called again with the same output, `tune` resumes if
    the function, the space and the objective are equal, and raises otherwise; `trials` may grow.
    """
    metric, reward = _objective(minimize, maximize)
    name = _name(function)
    directory = Path(output) if output is not None else _new_directory(name)
    workload: dict[str, Any] = {"type": "python", "args": dict(space), "constraints": list(constraints)}
    if timeout_s is not None:
        workload["timeout_s"] = timeout_s
    shipped = None if in_process else import_path(function) or write_pickle(function, directory / "function")
    path = [str((directory / "function").absolute()), *search_path()]
    measured = None
    if shipped is not None:
        workload |= {"function": shipped, "path": path}
        if metric is not None:
            workload["metrics"] = [metric]
    elif timeout_s is not None:
        raise ValueError("timeout_s needs a function that can be imported or pickled; this one runs in this process")
    else:
        version = code_digest(function)
        workload = {key: value for key, value in workload.items() if key != "type"} | {"type": "external"}

        def measured(config: WorkloadConfig, site: Site) -> Workload:
            return FunctionWorkload(config, site, function, version)

    scenario = {
        "name": name,
        "system": {"type": "local", "parallel": parallel},
        "run": [
            {
                "name": name,
                "agent": {**({"type": agent} if isinstance(agent, str) else agent), "trials": trials, "seed": seed},
                "reward": reward,
                "repeats": repeats,
                "workload": workload,
            }
        ],
    }
    loaded = load(scenario)
    resume = (directory / "campaign.json").exists()
    if resume:
        _check_equal(loaded, directory)
    code = _dispatch(loaded, directory, resume=resume, make_workload=measured)
    return Study.read(directory, name, code=code)
