"""Overrides of a scenario: what `set=` and `--set` say, over the environment, over the file.

| key | what it sets |
|---|---|
| `system.parallel` | a key of the scenario, dotted as its tables are written |
| `run.agent.trials` | a key of every run |
| `run.NAME.agent.trials` | a key of the run of that name |
| `loop.KEY`, `gateway.KEY` | a key of every remote loop, or of `[run.gateway]` in every run with one |

The environment variables of remote loops and gateways are listed in `loopwright.gateway.settings`.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

from pydantic import BaseModel

from loopwright.core.errors import did_you_mean
from loopwright.core.trial import Penalties
from loopwright.execution.system import SystemConfig, systems
from loopwright.gateway.settings import (
    GATEWAY,
    LOOP,
    PROXY_HOST,
    PROXY_URL,
    TOKEN,
    check_names,
    from_environment,
    is_loopback,
    parse_value,
    warn_once,
)
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.gateway_config import GATEWAY_HOSTS
from loopwright.rollouts.tasks.sources import task_sources
from loopwright.scenario.schema import RunConfig, Scenario

_ELSEWHERE = ("external", "server")
_MODELS: dict[str, Sequence[type[BaseModel]]] = {
    "": [Scenario],
    "system": [SystemConfig, *systems.working().values()],
    "run": [RunConfig],
    "run.rewards": [Penalties],
    "run.gateway": list(GATEWAY_HOSTS.values()),
    "gateway": list(GATEWAY_HOSTS.values()),
    "loop": [RemoteConfig],
}


def parse_assignments(texts: Sequence[str]) -> dict[str, Any]:
    """The overrides of `--set KEY=VALUE` options; a value is JSON or text. ValueError names the option."""
    overrides = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"--set {text!r}: write KEY=VALUE, such as system.parallel=4 or run.agent.trials=100")
        table, _, name = key.rpartition(".")
        models = _MODELS.get(table, ())
        model = next((model for model in models if name in model.model_fields), BaseModel)
        try:
            overrides[key] = parse_value(value, model, name)
        except ValueError as error:
            raise ValueError(f"--set {key} {error}") from error
    return overrides


def is_remote(run: Mapping[str, Any]) -> bool:
    """Whether the table of a run has a remote loop."""
    return bool(_remote_loops(run))


def _remote_loops(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tables of the remote loops of a run: its own, and those of its sources of tasks."""
    rollout = [run["rollout"]] if isinstance(run.get("rollout"), Mapping) else []
    loops = [entry.get("loop") for entry in (*rollout, *_sources(run, "rollout"), *_sources(run, "eval"))]
    return [loop for loop in loops if isinstance(loop, dict) and loop.get("type") == "remote"]


def _sources(run: Mapping[str, Any], table: str) -> list[dict[str, Any]]:
    """The tables of the sources of tasks in a table of a run."""
    tasks = run[table].get("tasks") if isinstance(run.get(table), Mapping) else None
    return [entry for entry in (tasks if isinstance(tasks, list) else [tasks]) if isinstance(entry, dict)]


def _add_what_tasks_bring(run: dict[str, Any]) -> None:
    """Environments of other frameworks bring a loop and a judger: a run of only such tasks need not name any."""
    training = _sources(run, "rollout")
    for key in ("loop", "judger"):
        complete = bool(training) and all(key in entry or key in _brings(entry) for entry in training)
        if complete and key in run["rollout"]:
            continue  # it is meant for them
        for entry in (*training, *_sources(run, "eval")):
            if key in _brings(entry):
                entry.setdefault(key, deepcopy(dict(_brings(entry)[key])))
        if complete:
            run["rollout"][key] = deepcopy(training[0][key])


def _brings(entry: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    name = entry.get("type")
    with suppress(KeyError, ImportError):
        return task_sources.get(name).brings if isinstance(name, str) and ":" not in name else {}
    return {}


def override(raw: Mapping[str, Any], overrides: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The scenario's tables with the environment and the overrides applied. ValueError names what is wrong."""
    result = deepcopy(dict(raw))
    tables = result.get("run")
    runs = [run for run in tables if isinstance(run, dict)] if isinstance(tables, list) else []
    # First the tasks: they may bring a loop, and the environment and other overrides set keys of that.
    tables_of_tasks = [key for key in overrides if re.fullmatch(r"run\..*(tasks(\..+)?|rollout|eval)", key)]
    for key in tables_of_tasks:
        _assign_to_runs(runs, key.removeprefix("run."), overrides[key])
    for run in runs:
        _add_what_tasks_bring(run)
    remote = [run for run in runs if is_remote(run)]
    from_file = [_gateway_type(run) for run in remote]
    if remote:
        check_names(environ, RemoteConfig, list(GATEWAY_HOSTS.values()), _own_variables(remote))
    for run in remote:
        _apply_environment(run, environ)
    _warn_of_other_gateways(remote, environ)
    for key, value in overrides.items():
        head, _, rest = key.partition(".")
        if head in ("loop", "gateway") and rest:
            if not remote:
                raise ValueError(f"--set {key}: no run has a remote loop")
            for run in remote:
                for table in _remote_loops(run) if head == "loop" else [run]:
                    _assign(table, rest if head == "loop" else key, value)
        elif head == "run" and key not in tables_of_tasks:
            _assign_to_runs(runs, rest, value)
        elif head != "run":
            _assign(result, key, value)
    if "system.type" in overrides:
        _drop_keys_of_another_system(result, raw, overrides)
    for run, before in zip(remote, from_file, strict=True):
        if _gateway_type(run) in _ELSEWHERE and before not in _ELSEWHERE:
            run.pop("engine", None)  # it was for the gateway in the file
    return result


def _drop_keys_of_another_system(result: dict[str, Any], raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Leave out the file's keys that the system of `--set system.type=…` does not have, such as a partition."""
    model = systems.working().get(str(overrides["system.type"]))
    table = raw.get("system")
    if model is not None and isinstance(table, Mapping) and table.get("type", "local") != overrides["system.type"]:
        for key in table:
            if key not in model.model_fields and f"system.{key}" not in overrides:
                del result["system"][key]


def _gateway_type(run: Mapping[str, Any]) -> Any:
    gateway = run.get("gateway")
    return gateway.get("type") if isinstance(gateway, Mapping) else None


def _apply_environment(run: dict[str, Any], environ: Mapping[str, str]) -> None:
    for loop in _remote_loops(run):
        loop |= from_environment(LOOP, RemoteConfig, environ)
    table = run.get("gateway", {})
    if not isinstance(table, Mapping):
        raise ValueError("[run.gateway] must be a table")
    url = environ.get(PROXY_URL)
    kind = environ.get(f"{GATEWAY}TYPE") or ("external" if url else table.get("type", "embedded"))
    model = GATEWAY_HOSTS.get(str(kind))
    if model is None:  # the loader lists the types that exist
        run["gateway"] = {**table, "type": kind}
        return
    # Keys of the type in the file may not exist in another type.
    gateway = {
        key: value for key, value in table.items() if kind == table.get("type", kind) or key in model.model_fields
    }
    gateway |= {"url": url} if url and kind == "external" else {}
    gateway |= from_environment(GATEWAY, model, environ)
    address = environ.get(PROXY_HOST)
    if address and gateway.get("advertise_host") == address and not is_loopback(address):
        gateway.setdefault("host", "::" if ":" in address else "0.0.0.0")  # noqa: S104  agents connect from elsewhere
    if gateway or kind != "embedded":
        run["gateway"] = {**gateway, "type": kind}


def _warn_of_other_gateways(runs: Sequence[Mapping[str, Any]], environ: Mapping[str, str]) -> None:
    """Warn of variables for a type of gateway that no run has, such as the URL of an external one."""
    types = {str(_gateway_type(run) or "embedded") for run in runs}
    usable = {key for name in types & GATEWAY_HOSTS.keys() for key in GATEWAY_HOSTS[name].model_fields}
    for key in {key for model in GATEWAY_HOSTS.values() for key in model.model_fields} - usable:
        name = f"{GATEWAY}{key.upper()}"
        if name in environ and name != TOKEN:
            having = ", ".join(kind for kind, model in GATEWAY_HOSTS.items() if key in model.model_fields)
            warn_once(name, f"sets nothing: [run.gateway] type = {', '.join(sorted(types))!r}; it is a key of {having}")


def _own_variables(runs: Sequence[Mapping[str, Any]]) -> set[str]:
    """The variables that remote runs name themselves, for their agents and their gateway's token."""
    names: set[str] = set()
    for run in runs:
        for loop in _remote_loops(run):
            variables = loop.get("pass_env", ())
            names.update(map(str, variables) if isinstance(variables, list | tuple) else ())
        gateway = run.get("gateway")
        names.add(str(gateway.get("token_env")) if isinstance(gateway, Mapping) else "")
    return names


def _assign_to_runs(runs: Sequence[dict[str, Any]], key: str, value: Any) -> None:
    head = key.partition(".")[0]
    if head not in RunConfig.model_fields:
        # Run names may contain dots; the longest match wins.
        names = sorted((str(run.get("name")) for run in runs), key=len, reverse=True)
        name = next((name for name in names if key.startswith(f"{name}.")), None)
        if name is None:
            choices = [*dict.fromkeys(names), *RunConfig.model_fields]
            raise ValueError(f"--set run.{key}: no run and no key is called {head!r}. {did_you_mean(head, choices)}")
        runs, key = [run for run in runs if str(run.get("name")) == name], key.removeprefix(f"{name}.")
    for run in runs:
        _assign(run, key, value)


def _assign(table: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; tables that are missing on the way are created."""
    *path, last = key.split(".")
    for depth, part in enumerate(path):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ValueError(f"--set {key}: {'.'.join(path[: depth + 1])} is not a table")
    table[last] = deepcopy(value)
