"""The command workload: a program with knobs, run in a directory of its own for each trial."""

import asyncio
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from loopwright.core.canonical import key_of
from loopwright.core.config import Config
from loopwright.core.errors import LaunchError, Problem, did_you_mean, storage
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.trial import Result
from loopwright.execution.base import Command, Completion, Executor
from loopwright.execution.local.executor import LocalExecutor
from loopwright.spaces.parameter import Fixed
from loopwright.workloads.base import (
    KEPT,
    Job,
    Site,
    Workload,
    WorkloadConfig,
    fingerprint_of,
    fresh_directory,
    link_into,
)
from loopwright.workloads.metric import MetricConfig, MetricMissing
from loopwright.workloads.template import CommandTemplate, as_text

_NOT_LINKED = (".done", "setup.stdout", "setup.stderr")


class SuccessConfig(Config):
    """When a command counts as done well."""

    exit_codes: tuple[int, ...] = (0,)
    """The exit codes of success."""
    regex: str | None = None
    """A pattern that standard output must contain as well."""

    @field_validator("regex")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                re.compile(pattern.encode())
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return pattern


class CommandConfig(WorkloadConfig):
    """A command whose arguments are searched."""

    type: Literal["command"] = "command"
    command: str | tuple[str, ...]
    """The command: `{name}` is replaced by an argument inside its word, `{name:words}` by the words of its value.
    No shell is involved; a word that names an absent argument is left out."""
    setup: str | tuple[str, ...] | None = None
    """A command that is run once per distinct set of the arguments that it names, in a directory of its own;
    what it makes there is linked into the trials' directories."""
    setup_timeout_s: float | None = Field(default=600, gt=0)
    """Seconds after which the set-up is ended."""
    metrics: dict[str, MetricConfig] = Field(default_factory=dict)
    """Metrics by name: `{ regex }` or `{ json }`, in stdout or in a `file`, or `{ resource }`."""
    success: SuccessConfig = SuccessConfig()
    """When a trial counts as `ok`: its exit code, and optionally what it printed."""

    @field_validator("command", "setup")
    @classmethod
    def _splits(cls, text: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if text is not None:
            CommandTemplate(text)
        return text

    @field_validator("metrics")
    @classmethod
    def _nameable(cls, metrics: dict[str, MetricConfig]) -> dict[str, MetricConfig]:
        for name in metrics:
            if not name.isidentifier():
                raise ValueError(f"{name!r} cannot be named in an expression; use letters, digits and _")
        return metrics

    def metric_names(self) -> tuple[str, ...]:
        return tuple(self.metrics)

    def problems(self, home: Path) -> list[Problem]:
        found = super().problems(home)
        parameters = {**self.args, **self.env}
        named: set[str] = set()
        for key, text in (("command", self.command), ("setup", self.setup)):
            if text is None:
                continue
            template = CommandTemplate(text)
            named |= template.names
            for name in sorted(template.names - parameters.keys()):
                hint = did_you_mean(name, list(parameters))
                found.append(
                    Problem(key, f"names {{{name}}}, which is no argument. {hint} Literal braces are doubled.")
                )
            for name in sorted(template.names & parameters.keys()):
                option = template.lonely(name) if parameters[name].when and parameters[name].otherwise is None else None
                if option:
                    fix = f"write {option}={{{name}}} as one word, or give {name} an `otherwise`"
                    found.append(Problem(key, f"{option} loses its value when {name} is absent; {fix}."))
            found += self._unusable_values(template)
            found += self._missing_program(key, template, home)
        for name in sorted(self.args.keys() - named):
            if not isinstance(self.args[name], Fixed):
                found.append(Problem(f"args.{name}", f"is searched, but neither command nor setup names {{{name}}}."))
        return found

    def _unusable_values(self, template: CommandTemplate) -> list[Problem]:
        """Values that no command line can hold; all of a list are tried, so that no night ends on one."""
        found = []
        for name, parameter in {**self.args, **self.env}.items():
            if name not in template.names and name not in self.env:
                continue
            values = [*parameter.grid(), *([] if parameter.otherwise is None else [parameter.otherwise])]
            wrong = [problem for value in values if (problem := template.problem_with(name, value))]
            found += [Problem(f"{'args' if name in self.args else 'env'}.{name}", problem) for problem in wrong]
        return found

    def _missing_program(self, key: str, template: CommandTemplate, home: Path) -> list[Problem]:
        program = template.program
        if program is None or program.startswith("/"):
            gone = program is not None and not os.access(program, os.X_OK)
            return [Problem(key, f"{program!r} is not an executable file.")] if gone else []
        if "/" not in program:
            path = str(fixed.value) if isinstance(fixed := self.env.get("PATH"), Fixed) else None
            if shutil.which(program, path=path) is None:
                return [Problem(key, f"{program!r} is not on the PATH. Install it, or name it by its path in `files`.")]
            return []
        made = key == "command" and self.setup is not None
        linked = any(Path(os.path.normpath(program)).is_relative_to(os.path.normpath(name)) for name in self.files)
        if made or linked:
            return []
        fix = f"add it: files = [{os.path.normpath(program)!r}]" if (home / program).exists() else "it does not exist"
        return [Problem(key, f"{program!r} is not among the `files` that are linked into a trial's directory; {fix}.")]


class CommandWorkload(Workload):
    """Runs a command per trial through an executor, and its set-up once per distinct set of arguments."""

    Config: ClassVar[type[WorkloadConfig]] = CommandConfig
    config: CommandConfig

    def __init__(self, config: CommandConfig, site: Site, executor: Executor | None = None) -> None:
        super().__init__(config, site)
        self.executor = executor or LocalExecutor(
            parallel=site.parallel,
            pin_cpus=site.pin_cpus,
            memory_bytes=site.memory_bytes,
            output_bytes=site.output_bytes,
            grace_s=site.grace_s,
        )
        self._command = CommandTemplate(config.command)
        self._setup = CommandTemplate(config.setup) if config.setup is not None else None
        self._locks: dict[str, asyncio.Lock] = {}
        self._broken: dict[str, Result] = {}
        self._base = {**os.environ, **{n: as_text(p.value) for n, p in config.env.items() if isinstance(p, Fixed)}}

    def fingerprint(self) -> str:
        # What a trial does and how it is read; how long it may take does not change what a good one says.
        text = self.config.model_dump_json(include={"command", "setup", "metrics", "success", "files"})
        return fingerprint_of(text, *self.inputs())

    async def run(self, job: Job) -> Result:
        job.flush_reservation()
        fresh_directory(job.directory)
        with storage(job.directory):
            (job.directory / "parameters.json").write_bytes(job.parameters_json)
        link_into(job.directory, self.site.scenario_dir, self.config.files)
        try:
            failed = await self._prepare(job)
            if failed is not None:
                return failed
            command = Command(
                argv=tuple(self._command.words(job.arguments)),
                directory=job.directory,
                environment=self._environment(job.arguments, self.config.env.keys()),
                stdout=job.directory / "stdout",
                stderr=job.directory / "stderr",
                timeout_s=self.config.timeout_s,
                marker=job.marker,
            )
            completion = await self.executor.run(command, job.on_start)
        except LaunchError as error:
            return _not_started(error)
        return self._judge(job.directory, completion)

    def _environment(self, arguments: Mapping[str, Any], names: Any) -> dict[str, str]:
        return {**self._base, **{name: as_text(arguments[name]) for name in names if name in arguments}}

    # -- the set-up ---------------------------------------------------------------------------------------------

    async def _prepare(self, job: Job) -> Result | None:
        """Have the set-up's products in the trial's directory; a result means that there are none."""
        if self._setup is None:
            return None
        used = {name: job.arguments[name] for name in sorted(self._setup.names) if name in job.arguments}
        key = key_of(used, self.fingerprint_once)[:16]
        directory = self.site.directory / "setup" / key
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._broken and not (directory / ".done").exists():
                failed = await self._set_up(job, used, directory)
                if failed is not None:
                    self._broken[key] = failed
        if key in self._broken:
            return self._broken[key]
        with storage(job.directory):
            _link_products(directory, job.directory, spared=(*_NOT_LINKED, *KEPT))
        return None

    @property
    def fingerprint_once(self) -> str:
        """The fingerprint as it was when the run began."""
        if not hasattr(self, "_fingerprint"):
            self._fingerprint = self.fingerprint()
        return self._fingerprint

    async def _set_up(self, job: Job, used: Mapping[str, Any], directory: Path) -> Result | None:
        assert self._setup is not None  # noqa: S101
        _empty(directory)
        link_into(directory, self.site.scenario_dir, self.config.files)
        command = Command(
            argv=tuple(self._setup.words(used)),
            directory=directory,
            environment=self._environment(used, self.config.env.keys() & used.keys()),
            stdout=directory / "setup.stdout",
            stderr=directory / "setup.stderr",
            timeout_s=self.config.setup_timeout_s,
            marker=job.marker,
        )
        completion = await self.executor.run(command, job.on_start)
        if completion.exit_code == 0 and not completion.timed_out:
            with storage(directory):
                (directory / ".done").touch()
            return None
        outcome = Outcome.TIMEOUT if completion.timed_out else Outcome.CRASHED
        ending = _ending(completion, self.config.setup_timeout_s, directory / "setup.stderr")
        return Result(outcome, reason=f"the set-up in setup/{directory.name} failed: {ending}")

    # -- the verdict --------------------------------------------------------------------------------------------

    def _judge(self, directory: Path, completion: Completion) -> Result:
        usage = completion.usage.as_dict()
        ending = _ending(completion, self.config.timeout_s, directory / "stderr")
        if completion.timed_out:
            return Result(Outcome.TIMEOUT, reason=ending, usage=usage)
        if completion.exit_code not in self.config.success.exit_codes:
            return Result(Outcome.CRASHED, reason=ending, usage=usage)
        pattern = self.config.success.regex
        stdout = directory / "stdout"
        if pattern is not None and not (stdout.is_file() and re.search(pattern.encode(), stdout.read_bytes())):
            return Result(Outcome.CRASHED, reason=f"stdout does not contain {pattern!r}", usage=usage)
        metrics: dict[str, float] = {}
        missing: list[str] = []
        for name, metric in self.config.metrics.items():
            try:
                metrics[name] = metric.read(directory, stdout, usage)
            except MetricMissing as error:
                missing.append(f"{name}: {error}")
        if missing:
            return Result(Outcome.METRIC_MISSING, reason="; ".join(missing), usage=usage)
        return Result(Outcome.OK, metrics, usage=usage)

    async def close(self) -> None:
        await self.executor.close()

    def kill(self) -> None:
        self.executor.kill_all()


def _empty(directory: Path) -> None:
    """Make a directory anew: without its mark it is what an interrupted set-up left."""
    with storage(directory):
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(parents=True)


def _link_products(source: Path, target: Path, spared: tuple[str, ...] = ()) -> None:
    """Link what the set-up made; where the inputs have a folder of the same name, into that folder."""
    for product in source.iterdir():
        place = target / product.name
        if place.is_dir() and not place.is_symlink() and not product.is_symlink():
            _link_products(product, place)
        elif product.name not in spared and not place.is_symlink():
            place.symlink_to(product)


def _not_started(error: LaunchError) -> Result:
    if error.infra:
        return Result(Outcome.LOST, reason=str(error), fault=Fault.INFRA)
    return Result(Outcome.CRASHED, reason=str(error))


def _ending(completion: Completion, timeout_s: float | None, stderr: Path) -> str:
    """How a command ended, in words, with the last thing that it complained about."""
    if completion.timed_out:
        how = f"it was ended after {timeout_s:g} s"
    elif completion.signal is not None:
        how = f"it ended by signal {completion.signal}"
    else:
        how = f"exit code {completion.exit_code}"
    return f"{how}; stderr ends with: {said}" if (said := _last_line(stderr)) else how


def _last_line(path: Path) -> str:
    if not path.is_file():  # A command may do away with its own directory.
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 400))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else ""
