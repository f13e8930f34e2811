"""The settings of the command workload, and what can be checked before anything runs."""

import os
import re
import shutil
from pathlib import Path
from typing import Any, Literal, Self

import regex
from pydantic import Field, field_validator, model_validator

from loopwright.core.config import Config
from loopwright.core.errors import Problem, did_you_mean
from loopwright.core.expression import Expression
from loopwright.spaces.parameter import Fixed
from loopwright.workloads.base import CommandTemplate, WorkloadConfig

_SLOT_NAMES = re.compile(r"slot|cpus|gpu|port(_[2-9])?|checkpoint")
"""What a command may name besides arguments: what its slot has."""


def check_pattern(pattern: str | None) -> str | None:
    """Raise ValueError unless the pattern compiles."""
    if pattern is not None:
        try:
            regex.compile(pattern.encode())
        except regex.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return pattern


def check_relative(name: str | None) -> str | None:
    """Raise ValueError if a file is outside of the trial's directory."""
    if name is not None and (Path(name).is_absolute() or ".." in Path(name).parts):
        raise ValueError(f"{name!r} must be relative to the trial's directory and stay inside it")
    return name


def check_pointer(text: str | None) -> str | None:
    """Raise ValueError unless this is a JSON pointer."""
    if text and not text.startswith("/"):
        fix = "/" + text.removeprefix("$").removeprefix(".").replace(".", "/")
        raise ValueError(f"{text!r} is not a JSON pointer; write {fix!r}")
    return text


def check_template(text: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    """Raise ValueError unless the placeholders of a command can be filled."""
    if text is not None:
        CommandTemplate(text)
    return text


class SourceConfig(Config):
    """What metrics are read from."""

    file: str | None = None
    """A file that the command writes, relative to the trial's directory; by default its output is read."""
    stream: Literal["stdout", "stderr"] = "stdout"
    """Which output is read, without a `file`."""
    required: bool = True
    """Whether a trial without such a metric has failed."""

    _check_path = field_validator("file")(check_relative)
    _check_pointer = field_validator("json_pointer", check_fields=False)(check_pointer)


class MetricConfig(SourceConfig):
    """Where to read one metric: by `regex` or `json` in the output or in `file`, or from the `resource` usage."""

    regex: str | None = None
    """A pattern whose first group is the number; the last match counts."""
    json_pointer: str | None = Field(default=None, alias="json")
    """A JSON pointer such as `/results/0/gflops` into the output, or into its last line."""
    csv: str | None = None
    """A column of a table in CSV with a header; the last row counts."""
    resource: Literal["wall_s", "user_s", "system_s", "max_rss_bytes"] | None = None
    """A resource that the trial used, instead of its output. `max_rss_bytes` is exact on this machine, and absent on
    a cluster where the kernel cannot tell."""
    group: int = Field(default=1, ge=1)
    """Which group of the pattern is the number."""

    @field_validator("regex")
    @classmethod
    def _check_group(cls, pattern: str | None) -> str | None:
        if check_pattern(pattern) is not None and regex.compile(str(pattern).encode()).groups < 1:
            raise ValueError(f"{pattern!r} needs a group, in parentheses, around the number")
        return pattern

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if sum(source is not None for source in (self.regex, self.json_pointer, self.csv, self.resource)) != 1:
            raise ValueError("give exactly one of regex, json, csv, resource")
        if self.regex is not None and regex.compile(self.regex.encode()).groups < self.group:
            raise ValueError(f"{self.regex!r} has no group {self.group}")
        if self.resource is not None and self.file is not None:
            raise ValueError("`file` goes with regex or json, not with resource")
        return self


class ReadConfig(SourceConfig):
    """Several metrics from one source: groups of a pattern, members of a JSON object, or columns in CSV."""

    names: tuple[str, ...] = Field(min_length=1)
    """The metrics."""
    regex: str | None = None
    """A pattern with as many groups as there are names; the last match counts."""
    json_pointer: str | None = Field(default=None, alias="json")
    """A JSON pointer to an object with these members."""
    csv: bool = False
    """Whether the names are columns of a table in CSV; the last row counts."""

    @model_validator(mode="after")
    def _check_metrics(self) -> Self:
        for name in self.names:
            if not name.isidentifier():
                raise ValueError(f"{name!r} cannot be used in an expression; use letters, digits and _")
        self.metrics()
        return self

    def metrics(self) -> dict[str, MetricConfig]:
        """One metric for each name."""
        common = {"file": self.file, "stream": self.stream, "required": self.required}
        metrics = {}
        for place, name in enumerate(self.names, 1):
            source: dict[str, Any] = {"regex": self.regex, "group": place} if self.regex is not None else {}
            if self.json_pointer is not None:
                source["json"] = f"{self.json_pointer}/{name}"
            if self.csv:
                source["csv"] = name
            metrics[name] = MetricConfig(**common, **source)
        return metrics


class SuccessConfig(Config):
    """When a command counts as successful."""

    exit_codes: tuple[int, ...] = (0,)
    """Exit codes that count as success."""
    regex: str | None = None
    """A pattern that standard output must also contain."""

    _check_regex = field_validator("regex")(check_pattern)


class ReadyConfig(Config):
    """When a service is ready: by `port`, `http` or `regex`. Without one, as soon as it runs."""

    port: int | str | None = None
    """A port of this machine that accepts connections, usually "{port}"."""
    http: str | None = Field(default=None, pattern=r"^http://")
    """An address whose GET is answered with a status below 400, such as "http://127.0.0.1:{port}/health"."""
    regex: str | None = None
    """A pattern in the service's output."""
    timeout_s: float = Field(default=60, gt=0)
    """Seconds after which the trial is a `timeout` if its service is not ready."""

    _check_regex = field_validator("regex")(check_pattern)

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if sum(source is not None for source in (self.port, self.http, self.regex)) > 1:
            raise ValueError("give one of port, http, regex")
        return self


class ProgressConfig(Config):
    """Where intermediate metrics are read from while a trial runs, line by line."""

    regex: str | None = None
    """A pattern with named groups, such as `step (?P<step>\\d+) loss (?P<loss>[0-9.]+)`. Without one each line is a
    JSON object such as `{"step": 3, "loss": 0.5}`. Without a `step` the lines are counted."""
    stream: Literal["stdout", "stderr"] = "stdout"
    """Which output is read."""
    file: str | None = None
    """A file that the command appends to, relative to the trial's directory, instead of its output."""

    _check_regex = field_validator("regex")(check_pattern)
    _check_path = field_validator("file")(check_relative)

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        names = set() if self.regex is None else regex.compile(self.regex.encode()).groupindex.keys()
        if self.regex is not None and not names - {"step"}:
            raise ValueError(f"{self.regex!r} needs a named group around each number, such as (?P<loss>[0-9.]+)")
        return self

    def metric_names(self) -> list[str]:
        """The named groups of the pattern."""
        return [name for name in regex.compile((self.regex or "").encode()).groupindex if name != "step"]


class ServiceConfig(Config):
    """A program that runs beside the trial's command, such as a database, and ends with it."""

    command: str | tuple[str, ...]
    """The command, with placeholders as in the workload's own; it must stay in the foreground."""
    name: str = Field(default="service", pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    """What the log is called: `NAME.stdout` and `NAME.stderr` in the trial's directory."""
    ready: ReadyConfig = ReadyConfig()
    """When the trial's command may start."""
    reuse: bool = False
    """Whether the service stays for the next trial of its slot with the same arguments. After a failed trial it does
    not."""

    _check_command = field_validator("command")(check_template)

    def templates(self) -> dict[str, CommandTemplate]:
        """Everything with placeholders, by key."""
        ready = self.ready.http if self.ready.port is None else str(self.ready.port)
        templates = {"service.command": CommandTemplate(self.command)}
        return templates | ({} if ready is None else {"service.ready": CommandTemplate((ready,))})


class CommandConfig(WorkloadConfig):
    """A command whose arguments are searched."""

    type: Literal["command"] = "command"
    command: str | tuple[str, ...]
    """The command: `{name}` is replaced by an argument within its word, `{name:words}` by the words of its value.
    It runs without a shell; a word with an absent argument is omitted."""
    setup: str | tuple[str, ...] | None = None
    """A command that runs once per distinct set of the arguments it names, in a separate directory;
    the files it creates are linked into the trials' directories."""
    setup_timeout_s: float | None = Field(default=600, gt=0)
    """Seconds after which the setup command is ended."""
    metrics: dict[str, MetricConfig] = Field(default_factory=dict)
    """Metrics by name: `{ regex }`, `{ json }` or `{ csv }`, in stdout, in stderr or in a `file`, or `{ resource }`."""
    read: tuple[ReadConfig, ...] = ()
    """Several metrics at a time."""
    success: SuccessConfig = SuccessConfig()
    """When a trial counts as `ok`: its exit code, and optionally its output."""
    progress: ProgressConfig | None = None
    """Intermediate metrics, for `stop` and for the learning curves of the report."""
    service: tuple[ServiceConfig, ...] = ()
    """Programs that run beside the command: one table, or several, started in their order."""

    _check_commands = field_validator("command", "setup")(check_template)

    @field_validator("service", mode="before")
    @classmethod
    def _one_or_several(cls, services: Any) -> Any:
        return (services,) if isinstance(services, dict | ServiceConfig) else services

    @field_validator("service")
    @classmethod
    def _check_services(cls, services: tuple[ServiceConfig, ...]) -> tuple[ServiceConfig, ...]:
        names = [service.name for service in services]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{', '.join(sorted(twice))}: give each service its own `name`")
        return services

    @model_validator(mode="after")
    def _check_read(self) -> Self:
        names = [*self.metrics, *(name for several in self.read for name in several.names)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)}: a metric is read twice; rename one of them")
        return self

    @field_validator("metrics")
    @classmethod
    def _check_names(cls, metrics: dict[str, MetricConfig]) -> dict[str, MetricConfig]:
        for name in metrics:
            if not name.isidentifier():
                raise ValueError(f"{name!r} cannot be used in an expression; use letters, digits and _")
        return metrics

    def metric_names(self) -> tuple[str, ...]:
        return tuple(self.all_metrics())

    def all_metrics(self) -> dict[str, MetricConfig]:
        """All metrics by name, those of `read` too."""
        return {**self.metrics, **{name: metric for several in self.read for name, metric in several.metrics().items()}}

    def problems(self, scenario_dir: Path) -> list[Problem]:
        problems = super().problems(scenario_dir)
        parameters = self.parameters
        for key, template in self.templates():
            for name in sorted(template.names - parameters.keys()):
                if key != "setup" and _SLOT_NAMES.fullmatch(name):
                    if name == "gpu" and not self.gpus:
                        problems.append(Problem(key, "{gpu} needs `gpus`, the number of GPUs of a trial."))
                    continue
                hint = did_you_mean(name, list(parameters))
                problems.append(Problem(key, f"unknown argument {{{name}}}. {hint} Write literal braces twice."))
            for name in sorted(template.names & parameters.keys()):
                can_be_absent = parameters[name].when and parameters[name].otherwise is None
                if can_be_absent and (option := template.option_before(name)):
                    fix = (
                        f"write {option}={{{name}}} as one word"
                        if option != "-c"
                        else f"pass {{{name}}} after the script"
                    )
                    fix += f", or give {name} an `otherwise`"
                    problems.append(Problem(key, f"{option} loses its value when {name} is absent; {fix}."))
            problems += self._unusable_values(template)
            problems += [
                Problem(key, f"{word!r} needs a shell; write sh -c '…', or quote it.") for word in template.operators
            ]
        return problems

    def unused_arguments(self) -> list[str]:
        names = {name for _, template in self.templates() for name in template.names}
        # A switch that only decides whether other arguments are present needs no place in a command.
        for parameter in self.parameters.values():
            names |= Expression(parameter.when).names if parameter.when is not None else set()
        return sorted(name for name in self.args.keys() - names if not isinstance(self.args[name], Fixed))

    def missing_programs(self, scenario_dir: Path) -> list[Problem]:
        templates = [(key, template) for key, template in self.templates() if key != "service.ready"]
        return [
            problem
            for key, template in templates
            for problem in missing_program(
                key, template, self, scenario_dir, may_be_built=key != "setup" and self.setup is not None
            )
        ]

    def templates(self) -> list[tuple[str, CommandTemplate]]:
        """Everything with placeholders, with its key."""
        commands = (("setup", self.setup), ("command", self.command))
        templates = [(key, CommandTemplate(text)) for key, text in commands if text is not None]
        return templates + [item for service in self.service for item in service.templates().items()]

    def slot_names(self) -> set[str]:
        """What the commands of a trial take from its slot."""
        names = {name for key, template in self.templates() if key != "setup" for name in template.names}
        return {name for name in names - self.args.keys() - self.env.keys() if _SLOT_NAMES.fullmatch(name)}

    def local_only(self) -> list[str]:
        return [
            *(["service"] if self.service else []),
            *(f"{{{name}}}" for name in sorted(self.slot_names() - {"checkpoint"})),
        ]

    def _unusable_values(self, template: CommandTemplate) -> list[Problem]:
        """Values that a command line cannot contain, including all values of a list, so that none fails hours later."""
        problems = []
        for name, parameter in {**self.args, **self.env}.items():
            if name not in template.names and name not in self.env:
                continue
            values = [*parameter.grid(), *([] if parameter.otherwise is None else [parameter.otherwise])]
            key = f"{'args' if name in self.args else 'env'}.{name}"
            problems += [Problem(key, text) for value in values if (text := template.problem_with(name, value))]
        return problems


def missing_program(
    key: str, template: CommandTemplate, workload: WorkloadConfig, scenario_dir: Path, *, may_be_built: bool = False
) -> list[Problem]:
    """Whether the program of a command exists; an earlier command may build it in the same directory."""
    program = template.program
    if program is None or program.startswith("/"):
        is_missing = program is not None and not os.access(program, os.X_OK)
        return [Problem(key, f"{program!r} is not an executable file.")] if is_missing else []
    if "/" not in program:
        path = str(fixed.value) if isinstance(fixed := workload.env.get("PATH"), Fixed) else None
        if shutil.which(program, path=path) is None:
            return [Problem(key, f"{program!r} is not on the PATH. Install it, or give its path in `files`.")]
        return []
    path = os.path.normpath(program)
    is_linked = any(Path(path).is_relative_to(os.path.normpath(name)) for name in workload.files)
    if is_linked or may_be_built:
        return []
    fix = f"add it: files = [{path!r}]" if (scenario_dir / program).exists() else "it does not exist"
    return [Problem(key, f"{program!r} is not among the `files` linked into a trial's directory; {fix}.")]
