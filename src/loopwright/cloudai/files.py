"""CloudAI's three kinds of file, and hooks: how they are written, found and merged."""

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator

from loopwright.cloudai.templates import templates
from loopwright.core.config import Config, explain
from loopwright.core.errors import Problem, ScenarioError, did_you_mean

M = TypeVar("M", bound=BaseModel)
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_EXAMPLE = """
    [[run]]
    name = "{name}"
    [run.workload]
    type = "command"
    command = "srun PROGRAM --{argument}={{{argument}}}"   # what {template} starts on your cluster
    metrics = {{ seconds = {{ regex = 'seconds: ([0-9.]+)' }} }}
    args = {{ {argument} = [1, 2] }}                         # a list is searched"""


class SystemFile(Config):
    """The system: a scheduler and what every test shares."""

    name: str
    scheduler: Literal["slurm", "standalone"]
    install_path: str = ""
    output_path: str = "results"
    hf_home_path: str | None = None
    global_env_vars: dict[str, Any] = Field(default_factory=dict)
    monitor_interval: int | None = None
    default_partition: str | None = None
    partitions: tuple[dict[str, Any], ...] = ()
    account: str | None = None
    distribution: str | None = None
    mpi: str = "pmix"
    gpus_per_node: int | None = None
    ntasks_per_node: int | None = None
    cache_docker_images_locally: bool = False
    extra_srun_args: str | None = None
    extra_sbatch_args: tuple[str, ...] = ()
    extra_transient_status_errors: tuple[str, ...] = ()
    status_retry_pause_seconds: int = 10
    container_mount_home: bool = False
    data_repository: dict[str, Any] | None = None
    reports: dict[str, Any] | None = None


class EnvParam(Config):
    """How the environment draws one argument."""

    weights: tuple[float, ...] | None = None
    encoding: dict[str, Any] = Field(default_factory=dict)


class TestDefinition(Config):
    """A test, after the scenario's overrides were merged into it."""

    name: str
    description: str = ""
    test_template_name: str
    cmd_args: dict[str, Any] = Field(default_factory=dict)
    dse_excluded_args: tuple[str, ...] = ()
    extra_env_vars: dict[str, Any] = Field(default_factory=dict)
    extra_cmd_args: dict[str, Any] = Field(default_factory=dict)
    extra_container_mounts: tuple[str, ...] = ()
    extra_srun_args: tuple[str, ...] = ()
    scripts: tuple[Any, ...] = ()
    git_repos: tuple[Any, ...] = ()
    nsys: dict[str, Any] | None = None
    predictor: dict[str, Any] | None = None
    training_report: dict[str, Any] | None = None
    agent: str = "grid_search"
    agent_steps: int | None = None
    agent_metrics: tuple[str, ...] = ("default",)
    agent_reward_function: str = "inverse"
    agent_config: dict[str, Any] | None = None
    env_params: dict[str, EnvParam] = Field(default_factory=dict)

    @field_validator("dse_excluded_args", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("dse_excluded_args")
    @classmethod
    def _below_arguments(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if not path.startswith("cmd_args.") or path.endswith("."):
                raise ValueError(f"{path!r} must begin with 'cmd_args.'")
        return paths

    def is_excluded(self, name: str) -> bool:
        """Whether a list is one value, not candidates."""
        path = f"cmd_args.{name}"
        return any(path == excluded or path.startswith(f"{excluded}.") for excluded in self.dse_excluded_args)


class Dependency(Config):
    """On which test another one waits, and for what."""

    type: Literal["end_post_comp", "start_post_init", "start_post_comp"]
    id: str


class TestRun(Config):
    """One entry of a scenario, without what it overrides in its test."""

    id: str = Field(min_length=1)
    test_name: str | None = None
    num_nodes: int | tuple[int, ...] = 1
    nodes: tuple[str, ...] = ()
    exclude_nodes: tuple[str, ...] = ()
    weight: float = 0
    iterations: int = Field(default=1, ge=1)
    sol: float | None = None
    ideal_perf: float = 1.0
    time_limit: str | None = None
    dependencies: tuple[Dependency, ...] = ()
    extra_srun_args: str | None = None

    @field_validator("time_limit")
    @classmethod
    def _is_time(cls, text: str | None) -> str | None:
        if text is not None:
            seconds_of(text)
        return text


class ScenarioFile(Config):
    """A scenario: tests, and hooks before and after each of them."""

    name: str
    sol_path: str | None = None
    job_status_check: bool = True
    Tests: tuple[dict[str, Any], ...] = Field(min_length=1)
    pre_test: str | None = None
    post_test: str | None = None
    reports: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class ReadScenario:
    """A scenario with its tests complete."""

    file: Path
    config: ScenarioFile
    runs: tuple[tuple[TestRun, TestDefinition], ...]
    hooks: "Mapping[str, ReadScenario]"
    """The hooks that it names, by `pre_test` and `post_test`."""


def seconds_of(text: str) -> int:
    """A time limit as Slurm writes it: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S; also 30m and 2h."""
    if match := re.fullmatch(r"(\d+)([smhd])", text.strip()):
        return int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a time limit; write it as HH:MM:SS")
    days, *parts = (int(part) if part is not None else None for part in match.groups())
    first, second, third = parts
    if days is not None:
        return days * 86400 + (first or 0) * 3600 + (second or 0) * 60 + (third or 0)
    if third is not None:
        return (first or 0) * 3600 + (second or 0) * 60 + third
    return (first or 0) * 60 + (second or 0)


def read_system(path: Path) -> SystemFile:
    """The system's file."""
    table = _read(path)
    scheduler = table.get("scheduler")
    if scheduler not in ("slurm", "standalone"):
        fix = 'Loopwright runs CloudAI\'s tests on scheduler = "slurm" or "standalone"'
        raise ScenarioError(path, [Problem("scheduler", f"{scheduler!r} is not supported. {fix}.")])
    return _model(path, "", table, SystemFile)


def read_scenario(path: Path, tests: Path | None, hooks: Path | None = None) -> ReadScenario:
    """A scenario, its tests from a directory, and the hooks it names from another."""
    config = _model(path, "", _read(path), ScenarioFile)
    definitions = _definitions(tests)
    names = {kind: name for kind in ("pre_test", "post_test") if (name := getattr(config, kind)) is not None}
    # By default `conf/hook` here, or `hook` in a folder above the scenario.
    places = [Path("conf/hook"), *(parent / "hook" for parent in list(path.absolute().parents)[1:4])]
    directory = hooks or next((place for place in places if place.is_dir()), places[0])
    files = {_read(file).get("name"): file for file in sorted(directory.glob("*.toml"))} if names else {}
    hook_scenarios = {}
    for kind, name in names.items():
        if name not in files:
            fix = f"{did_you_mean(name, list(map(str, files)))} Give its directory with --hook-dir."
            raise ScenarioError(path, [Problem(kind, f"no hook {name!r} in {directory}. {fix}")])
        hook_scenarios[kind] = _complete(
            files[name],
            _model(files[name], "", _read(files[name]), ScenarioFile),
            {**definitions, **_definitions(directory / "test")},
        )
    return _complete(path, config, definitions, hook_scenarios)


def _complete(
    path: Path,
    config: ScenarioFile,
    definitions: Mapping[str, dict[str, Any]],
    hooks: Mapping[str, ReadScenario] | None = None,
) -> ReadScenario:
    """Merge each entry into its test."""
    problems: list[Problem] = []
    tables = []
    for entry in config.Tests:
        name = entry.get("test_name")
        key = f"[[Tests]] {entry.get('id', '')}"
        # A list is an override of SlurmContainer's test, a text belongs to the entry.
        own = {k for k in TestRun.model_fields if k in entry} - (
            {"extra_srun_args"} if isinstance(entry.get("extra_srun_args"), list) else set()
        )
        overrides = {k: v for k, v in entry.items() if k not in own}
        if name is not None and name not in definitions:
            fix = f"{did_you_mean(str(name), list(definitions))} Give the directory of its file."
            problems.append(Problem(key, f"no test {name!r}. {fix}"))
        elif name is not None and "test_template_name" in overrides:
            problems.append(Problem(key, "has `test_name` and `test_template_name`; keep one of them."))
        elif name is None and "test_template_name" not in overrides:
            problems.append(Problem(key, "needs `test_name`, or `test_template_name` with the whole test."))
        else:
            test = merge(definitions[name], overrides) if name is not None else {"name": entry.get("id"), **overrides}
            tables.append((key, {k: entry[k] for k in own}, test))
    _require_templates(path, tables)
    if problems:
        raise ScenarioError(path, problems)
    runs = []
    for key, table, test in tables:
        try:
            runs.append((_model(path, key, table, TestRun), _model(path, key, test, TestDefinition)))
        except ScenarioError as error:
            problems += error.problems
    ids = [run.id for run, _ in runs]
    problems += [Problem(f"[[Tests]] {one}", "is used twice.") for one in dict.fromkeys(ids) if ids.count(one) > 1]
    for run, _ in runs:
        for one in run.dependencies:
            if one.id not in ids or one.id == run.id:
                text = f"depends on {one.id!r}, which is not another test of this file."
                problems.append(Problem(f"[[Tests]] {run.id}", text))
    if problems:
        raise ScenarioError(path, problems)
    return ReadScenario(path, config, tuple(runs), hooks or {})


def _require_templates(path: Path, tables: Iterable[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> None:
    """One error per file for all templates that are not supported."""
    others = [(own.get("id"), test) for _, own, test in tables if test.get("test_template_name") not in templates]
    if not others:
        return
    names = ", ".join(dict.fromkeys(str(test.get("test_template_name")) for _, test in others))
    identifier, test = others[0]
    argument = next((k for k, v in test.get("cmd_args", {}).items() if isinstance(v, (int, list))), "batch_size")
    example = _EXAMPLE.format(name=identifier, template=test.get("test_template_name"), argument=argument)
    text = f"{names} is not supported; supported: {', '.join(templates)}. Write it as a command:{example}"
    raise ScenarioError(path, [Problem("test_template_name", text)])


def merge(table: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A table with overrides; tables inside it are merged, anything else is replaced."""
    merged = dict(table)
    for key, value in overrides.items():
        inner = merged.get(key)
        merged[key] = merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _definitions(directory: Path | None) -> dict[str, dict[str, Any]]:
    """The tests of a directory, by name; those of its folders only where the name is free."""
    if directory is None or not directory.is_dir():
        return {}
    files = sorted(directory.rglob("*.toml"), key=lambda file: (len(file.parts), file))
    tests: dict[str, dict[str, Any]] = {}
    for file in files:
        table = _read(file)
        if "test_template_name" in table:
            tests.setdefault(str(table.get("name")), table)
    return tests


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read: {getattr(error, 'strerror', None) or error}."
    except tomllib.TOMLDecodeError as error:
        problem = f"is not valid TOML: {error}."
    raise ScenarioError(path, [Problem("", problem)])


def _model(path: Path, key: str, table: Mapping[str, Any], model: type[M]) -> M:
    try:
        return model.model_validate(table)
    except ValidationError as error:
        problems = [Problem(f"{key} {where}".strip(), f"{text}.") for where, text in explain(error, model)]
    raise ScenarioError(path, problems)
