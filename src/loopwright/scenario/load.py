"""Loading a scenario: every check that can be made before anything runs, and every problem at once."""

import os
import re
import tomllib
from collections.abc import Mapping
from datetime import date, time
from pathlib import Path
from typing import Any

import tomli_w

from loopwright.agents import agents, rollout_agents
from loopwright.core.errors import Problem, ScenarioError, sentence
from loopwright.core.registry import look_for_types
from loopwright.execution.system import SystemConfig, systems
from loopwright.scenario.checker import Checker
from loopwright.scenario.kinds.base import LoadedScenario, RunKind
from loopwright.scenario.kinds.live import LiveRun
from loopwright.scenario.kinds.rollout import RolloutRun, needs_rollout_agent
from loopwright.scenario.kinds.search import SearchRun
from loopwright.scenario.kinds.training import TrainingRun
from loopwright.scenario.overrides import override
from loopwright.scenario.plain import check_dependencies
from loopwright.scenario.schema import Scenario


def load(
    source: str | Path | Mapping[str, Any],
    *,
    directory: str | Path | None = None,
    set: Mapping[str, Any] | None = None,
    has_server: bool = False,
) -> LoadedScenario:
    """Read and check a scenario, a TOML file or the same as a dict. A ScenarioError lists everything that is wrong.

    Paths in it are relative to `directory`: by default the file's directory, for a dict the current one.
    `set` overrides keys: `{"system.parallel": 4, "run.agent.trials": 100}`; see `loopwright.scenario.overrides`.
    With `has_server`, a live run need not name its environment: the caller passes it to `dispatch` or `make`.
    """
    if not isinstance(source, str | os.PathLike | Mapping):
        raise TypeError(f"a scenario is the path of a TOML file, or a dict, not {source!r}")
    if not isinstance(set, Mapping | None):
        raise TypeError(f'set is a dict such as {{"system.parallel": 4}}, not {set!r}')
    problems: list[Problem] = []
    overrides = _plain(set or {}, ("set",), [])  # None is a value there, JSON's null
    if isinstance(source, Mapping):
        raw, path, start = _plain(source, (), problems), None, Path.cwd()
        if problems:
            raise ScenarioError("scenario", problems)
        text = tomli_w.dumps(raw)
    else:
        path = Path(source).absolute()
        text, raw = _read_file(Path(source))
        start = path.parent
    try:
        raw = override(raw, overrides, os.environ)
    except ValueError as error:
        problems.append(Problem("", sentence(error)))
    directory = Path(directory).absolute() if directory is not None else start / str(raw.get("home", ""))
    look_for_types(raw, directory)
    checker = Checker(directory, problems)
    checker.has_server = has_server
    name, system, runs = _read_scenario(raw, checker)
    if checker.problems or system is None:
        raise ScenarioError("scenario" if path is None else str(source), checker.problems)
    scenario = Scenario.model_construct(name=name, home=str(directory), system=system, run=runs)
    label = "scenario from Python" if path is None else str(path)
    hints = [(run.name, hint) for run in runs for hint in run.hints()]
    return LoadedScenario(scenario, runs, raw, text, path, directory, overrides, label, hints)


def _plain(value: Any, keys: tuple[str, ...], problems: list[Problem]) -> Any:
    """A value from Python as TOML has it: tuples, ranges and numpy's arrays are lists, numpy's numbers are numbers."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item, (*keys, str(key)), problems) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [_plain(item, keys, problems) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if not isinstance(value, str | int | float | date | time):
        *tables, name = keys
        table = "[[run]]" if tables == ["run"] else f"[{'.'.join(tables[:2])}]" if tables else ""
        key = f"{table} {'.'.join((*tables[2:], name))}".strip()
        problems.append(Problem(key, f"cannot be {value!r:.80}; use text, a number, a list or a dict."))
    return value


def _read_file(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # Some editors begin a file with a byte order mark.
        return text, tomllib.loads(text)
    except FileNotFoundError:
        problem = "there is no such file. Give the path of a scenario, one TOML file."
    except IsADirectoryError:
        problem = "is a directory. Give one of the scenarios in it, or check them all with `loopwright verify`."
    except UnicodeDecodeError as error:
        problem = f"is not text: byte {error.start} is not UTF-8. Give a scenario, one TOML file."
    except OSError as error:
        problem = f"cannot be read: {error.strerror}. Check its permissions."
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line (\d+)", str(error))
        line = text.split("\n")[int(place[1]) - 1].strip() if place else ""
        advice = " Text needs quotes." if str(error).startswith("Invalid value") else ""
        problem = f"is not valid TOML: {error}{line and f': {line}'}.{advice}"
    raise ScenarioError(path, [Problem("", problem)])


def _read_scenario(raw: Mapping[str, Any], checker: Checker) -> tuple[str, SystemConfig | None, tuple[RunKind, ...]]:
    checker.unknown_keys("", raw, Scenario)
    table, system = raw.get("system", {}), None
    if isinstance(table, dict):
        table = {"type": "local", **table}
        kind = checker.registered("[system]", table, systems)
        system = checker.model("[system]", table, kind) if kind is not None else None
        system = system.resolved(checker.directory) if system is not None else None
        checker.system = system or (checker.system if kind is None else kind.model_construct())
    else:
        checker.add("[system]", f"must be a table, not {table!r}.")
    name = raw.get("name", "")
    if not isinstance(name, str) or not name:
        checker.add("name", "is missing; give the scenario a name, in quotes.")
    if not checker.directory.is_dir():
        checker.add("home", f"there is no directory {checker.directory}.")
    tables = raw.get("run")
    if isinstance(tables, dict):
        checker.add("[run]", "must be [[run]], with two brackets: a scenario has a list of runs.")
        return name, system, ()
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        checker.add("[[run]]", "is missing; a scenario has at least one [[run]].")
        return name, system, ()
    runs = []
    for table in tables:
        checker.suffix = f" (run {table.get('name')!r})" if len(tables) > 1 else ""
        runs.append(_read_run(table, checker))
    checker.suffix = ""
    names = [table["name"] for table in tables if isinstance(table.get("name"), str)]
    for one in dict.fromkeys(n for n in names if names.count(n) > 1):
        checker.add("[[run]] name", f"{one!r} is used {names.count(one)} times; each run needs its own folder.")
    check_dependencies(tables, checker)
    plain = [str(table.get("name")) for table in tables if "agent" not in table]
    if plain and len(plain) < len(tables):
        message = f"runs with and without an agent are mixed; {', '.join(plain)} has none. Split the file."
        checker.add("[[run]]", message)
    return name, system, tuple(run for run in runs if run is not None)


def _read_run(raw: dict[str, Any], checker: Checker) -> RunKind | None:
    """Decide which kind of run a table describes, and read it as that.

    The kind picks the registry of agents: `ppo` is another agent in a run with rollouts.
    """
    has_rollouts, agent = "rollout" in raw, None
    registry, other = (rollout_agents, agents) if has_rollouts else (agents, rollout_agents)
    if "agent" in raw:
        name = raw["agent"].get("type") if isinstance(raw["agent"], dict) else None
        if name in registry.names() or name not in other.names():
            agent = checker.registered("[run.agent]", raw["agent"], registry)
        elif has_rollouts:
            needs_rollout_agent(checker)
        else:
            checker.add("[run.rollout]", f"is missing; agent {name!r} works on rollouts.")
    kind: type[RunKind]
    if has_rollouts:
        kind = TrainingRun if agent is not None and agent.gives_weights else RolloutRun
    else:
        kind = LiveRun if "live" in raw else SearchRun
    return kind.read(raw, agent, checker)
