"""`tune` and `run`: a search over a Python function, and what `loopwright run` does, as Python calls."""

import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

from loopwright.api.objects import register
from loopwright.api.resume import check_same_study
from loopwright.api.shipping import MODULE, code_digest, import_path, search_path, write_pickle
from loopwright.api.study import Study
from loopwright.core.errors import Problem, ScenarioError
from loopwright.envs.live.server import GymServer
from loopwright.reports.export import replacing
from loopwright.reports.progress import show_progress
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.kinds.base import LoadedScenario
from loopwright.scenario.load import load
from loopwright.workloads.in_process import InProcessWorkload


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
    constraints: str | Sequence[str] = (),
    noise: Mapping[str, Sequence[Any]] | None = None,
    confirm: bool | Mapping[str, Any] | None = None,
    stop: str | Mapping[str, Any] | None = None,
    in_process: bool = False,
    progress: bool | None = None,
) -> Study:
    """Search the space for the best arguments of a function, and return the study.

        study = tune(train, {"lr": log(1e-5, 1e-1), "layers": [1, 2, 4]}, minimize="loss", trials=100)

    `function` gets keyword arguments and returns a dict of metrics, or one number (then pass `minimize=True` or
    `maximize=True`). A list is a choice, `log`, `uniform` and `integer` are ranges, anything else is fixed.

    The function runs in worker processes, which enforce `timeout_s` and survive its crashes, if it can be imported or
    pickled. Otherwise, or with `in_process=True`, it runs in threads of this process, without a timeout.

    `noise={"seed": [1, 2, 3]}` gives the function an argument that is averaged over and not searched. From 30 trials
    on, part of them measures the best configurations again; `confirm=False` uses all of them for the search.

    `stop="asha"` stops hopeless trials early, by the same metric: the function calls `loopwright.report(step, loss=…)`,
    or is a generator that yields metrics. A mapping sets more, as `stop` in a scenario.

    Without `output` the study gets a new directory under `out/`. Called again with the same output, `tune` resumes if
    the function, the space and the objective are equal, and raises otherwise; `trials` may grow.
    Progress is shown on stderr if it is a terminal; `progress=True` shows it always, `progress=False` never.
    """
    _check_types(function, space, agent)
    name = re.sub(r"\W+", "-", getattr(function, "__name__", "function")).strip("-") or "function"
    directory = Path(output) if output is not None else _new_directory(name)
    metric, reward = _objective(minimize, maximize)
    rules = [constraints] if isinstance(constraints, str) else list(constraints)
    workload = _workload(function, name, directory, timeout_s, in_process=in_process)
    run_table = {
        "name": name,
        "agent": {"trials": trials, "seed": seed, **({"type": agent} if isinstance(agent, str) else agent)},
        "reward": reward,
        "repeats": repeats,
        "workload": workload | {"metrics": [metric], "args": dict(space), "constraints": rules},
        **_optional_tables(noise, confirm, stop, {"metric": metric, "mode": "min" if minimize else "max"}),
    }
    loaded = _load({"name": name, "system": {"type": "local", "parallel": parallel}, "run": [run_table]})
    if resume := (directory / "campaign.json").exists():
        check_same_study(loaded, directory)
        with replacing(directory / "scenario.toml") as file:
            file.write(loaded.text)  # `trials` may have grown
    return Study.read(directory, name, code=_dispatch(loaded, directory, resume=resume, progress=progress))


def run(
    scenario: str | Path | Mapping[str, Any],
    output: str | Path | None = None,
    *,
    set: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool | None = None,
    server: GymServer | None = None,
) -> Study:
    """Run a scenario, a TOML file or the same as a dict, and return its first run as a study.

    `set` overrides keys, as in `{"system.parallel": 4}`. With `resume`, the campaign in `output` is continued, with
    `overwrite` it is deleted first.
    Progress is shown on stderr if it is a terminal; `progress=True` shows it always, `progress=False` never.
    `server` is the environment of the live run, an object such as a `gymnasium.Env`, stepped in this process and closed
    at the end. `[run.live]` then does not have to name one.
    """
    loaded = load(scenario, set=set, has_server=server is not None)
    directory = Path(output) if output is not None else _new_directory(loaded.scenario.name)
    code = _dispatch(loaded, directory, resume=resume, progress=progress, server=server, overwrite=overwrite)
    return Study.read(directory, loaded.scenario.run[0].name, code=code)


def _check_types(function: Any, space: Any, agent: Any) -> None:
    if not callable(function):
        raise TypeError(f"tune needs a function, not {function!r}")
    if not isinstance(space, Mapping):
        raise TypeError(f'the space must be a dict such as {{"lr": loopwright.log(1e-5, 1e-1)}}, not {space!r}')
    if not isinstance(agent, str | Mapping):
        raise TypeError(
            f'agent must be a name such as "tpe" or a table such as {{"type": "module:Class"}}, not {agent!r}'
        )


def _load(scenario: Mapping[str, Any]) -> LoadedScenario:
    """Load the scenario of a call; problems name the arguments of `tune` instead of the scenario's keys."""
    problems = []
    try:
        return load(scenario)
    except ScenarioError as error:
        for problem in error.problems:
            key = problem.key.rpartition("] ")[2].replace("args", "space", 1)
            message = problem.message.replace(f"{MODULE}:", "")
            problems.append(Problem("agent" if key in ("type", "[run.agent]") else key, message))
    raise ScenarioError("tune", problems)


def _optional_tables(
    noise: Mapping[str, Sequence[Any]] | None,
    confirm: bool | Mapping[str, Any] | None,
    stop: str | Mapping[str, Any] | None,
    objective: Mapping[str, str],
) -> dict[str, Any]:
    """The tables of a run that only some studies have. Trials are stopped by the objective unless `stop` says more."""
    tables: dict[str, Any] = {}
    if noise is not None:
        tables["noise"] = {n: list(values) if isinstance(values, tuple) else values for n, values in noise.items()}
    if confirm is not None:
        tables["confirm"] = confirm if isinstance(confirm, bool) else dict(confirm)
    if stop is not None:
        tables["stop"] = {**objective, **({"rule": stop} if isinstance(stop, str) else stop)}
    return tables


def _objective(minimize: str | bool | None, maximize: str | bool | None) -> tuple[str, dict[str, Any]]:
    """The metric that is optimised, and the reward table for it."""
    if bool(minimize) == bool(maximize):
        raise TypeError(
            'pass either minimize or maximize: the name of a metric, such as "loss", or True for one number'
        )
    choice = minimize or maximize
    if not isinstance(choice, str | bool):
        raise TypeError(f'minimize and maximize take the name of one metric, such as "loss", or True, not {choice!r}')
    metric = choice if isinstance(choice, str) else "value"
    return metric, {"type": "negative" if minimize else "identity", "metrics": [metric]}


def _workload(
    function: Callable[..., Any], name: str, directory: Path, timeout_s: float | None, *, in_process: bool
) -> dict[str, Any]:
    """The workload table: the function in worker processes where it can be shipped, otherwise in this process."""
    shipped = None if in_process else import_path(function) or write_pickle(function, directory / "function")
    if shipped is not None:
        path = [str((directory / "function").absolute()), *search_path()]
        return {"type": "python", "function": shipped, "path": path} | (
            {} if timeout_s is None else {"timeout_s": timeout_s}
        )
    if timeout_s is not None:
        raise ValueError("timeout_s needs a function that can be imported or pickled; this one runs in this process")
    workload = type(
        "InProcessFunction",
        (InProcessWorkload,),
        {"version": code_digest(function), "call": lambda _, arguments: function(**arguments)},
    )
    return {"type": register(name, workload)}


def _new_directory(name: str) -> Path:
    """A directory under `out/` that does not exist yet."""
    stem = Path("out", f"{name}-{datetime.now().astimezone():%Y%m%d-%H%M%S}")
    number, directory = 1, stem
    while directory.exists():
        number += 1
        directory = stem.with_name(f"{stem.name}-{number}")
    return directory


def _dispatch(loaded: LoadedScenario, output: Path, *, resume: bool, progress: bool | None, **options: Any) -> int:
    """Dispatch, and raise a signal once the run has stopped."""
    visible = sys.stderr.isatty() if progress is None else progress
    with show_progress(None, sys.stderr) if visible else nullcontext(lambda _: ()) as watch:
        code = dispatch(loaded, output, resume=resume, watch=watch, **options)
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code > 128:
        raise SystemExit(code)
    return code
