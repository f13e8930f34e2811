"""The command workload: runs a program with parameters, in a separate directory for each trial.

A command is split into words before values are inserted, so that no value is interpreted by a shell. Metrics are
numbers from its output, from a file it wrote, or from its resource usage.
"""

import asyncio
import json
import math
import mmap
import os
import re
import shlex
import shutil
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import regex
from pydantic import Field, field_validator, model_validator

from loopwright.core.canonical import key_of
from loopwright.core.config import Config
from loopwright.core.errors import LaunchError, Problem, did_you_mean, storage
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.trial import Result
from loopwright.execution.base import Command, Completion, Executor
from loopwright.execution.local.executor import LocalExecutor
from loopwright.spaces.parameter import Fixed
from loopwright.workloads.base import (
    RESERVED_FILES,
    Job,
    Site,
    Workload,
    WorkloadConfig,
    as_text,
    fresh_directory,
    last_line,
    link_into,
    link_products,
    recreate,
)

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)(?::([A-Za-z]*))?\}")
_MATCH_NOW_S = 0.02
"""How long patterns are matched in the event loop; almost all are done by then. The rest moves to a thread."""
_MATCH_S = 10.0
"""After how many seconds of matching a trial fails."""
_NOT_LINKED = (".done", "setup.stdout", "setup.stderr")


class CommandTemplate:
    """A command with placeholders for arguments.

    >>> CommandTemplate("gcc {opt:words} bench.c -o bench").words({"opt": "-O3 -march=native"})
    ['gcc', '-O3', '-march=native', 'bench.c', '-o', 'bench']
    """

    def __init__(self, text: str | tuple[str, ...]) -> None:
        self._words = shlex.split(text) if isinstance(text, str) else list(text)
        if not self._words:
            raise ValueError("the command is empty")
        for word in self._words:
            for match in _PLACEHOLDER.finditer(word):
                if match[2] is not None and (match[2] != "words" or match[0] != word):
                    raise ValueError(f"{match[0]} in {word!r}: use {{name}}, or {{name:words}} as a separate word")
        self.names = frozenset(m[1] for word in self._words for m in _PLACEHOLDER.finditer(word) if m[1])

    @property
    def program(self) -> str | None:
        """The program to run; None if it contains a placeholder."""
        first = self._words[0]
        return None if any(m[1] for m in _PLACEHOLDER.finditer(first)) else first

    def option_before(self, name: str) -> str | None:
        """The option before the word `{name}`, which would lose its value if the argument is absent."""
        for option, word in zip(self._words, self._words[1:], strict=False):
            if word in (f"{{{name}}}", f"{{{name}:words}}") and option.startswith("-") and "=" not in option:
                return option
        return None

    def problem_with(self, name: str, value: Any) -> str | None:
        """Why a value cannot be part of a command line; None if it can."""
        text = as_text(value)
        if "\0" in text:
            return f"{value!r} contains a NUL character, which a command line cannot."
        if f"{{{name}:words}}" in self._words:
            try:
                shlex.split(text)
            except ValueError as error:
                return f"{value!r} cannot be split into words: {str(error).lower()}."
        return None

    def words(self, arguments: Mapping[str, Any]) -> list[str]:
        """The words of the command; a word with an absent argument is omitted."""
        words: list[str] = []
        for word in self._words:
            names = {m[1] for m in _PLACEHOLDER.finditer(word) if m[1]}
            if not names <= arguments.keys():
                continue
            whole = _PLACEHOLDER.fullmatch(word)
            if whole and whole[2] == "words":
                words += shlex.split(as_text(arguments[whole[1]]))
            else:
                words.append(_PLACEHOLDER.sub(lambda m: as_text(arguments[m[1]]) if m[1] else m[0][0], word))
        return words


class MetricMissing(Exception):
    """A metric that could not be read; the message says where it was expected."""


class PatternTimeout(Exception):
    """A regular expression that took too long; the message names it, the size of its input and the fix."""


def _matches(pattern: str, path: Path, source: str, timeout_s: float, group: int = 0) -> Iterator[bytes | None]:
    """A group of each match in a file. Matching ends after the timeout, and lets other threads run."""
    # Bytes, mapped: output may be large and need not be valid UTF-8.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            for match in regex.finditer(pattern.encode(), content, timeout=timeout_s, concurrent=True):
                yield match[group]
        except TimeoutError as error:
            raise PatternTimeout(
                f"matching {pattern!r} in {source} ({len(content):,} bytes) took more than {timeout_s:g} s. Avoid "
                "repeats within repeats, such as (a+)+, or let the command print less"
            ) from error


class MetricConfig(Config):
    """Where to read one metric: by `regex` or `json` in the output or in `file`, or from the `resource` usage."""

    regex: str | None = None
    """A pattern whose first group is the number; the last match counts."""
    json_pointer: str | None = Field(default=None, alias="json", pattern=r"^(/.*)?$")
    """A JSON pointer such as `/results/0/gflops` into the output, or into its last line."""
    file: str | None = None
    """A file that the command writes, relative to the trial's directory; by default standard output is read."""
    resource: Literal["wall_s", "user_s", "system_s", "max_rss_bytes"] | None = None
    """A resource that the trial used, instead of its output."""

    @field_validator("regex")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                groups = regex.compile(pattern.encode()).groups
            except regex.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
            if groups < 1:
                raise ValueError(f"{pattern!r} needs a group, in parentheses, around the number")
        return pattern

    @field_validator("file")
    @classmethod
    def _check_file(cls, name: str | None) -> str | None:
        if name is not None and (Path(name).is_absolute() or ".." in Path(name).parts):
            raise ValueError(f"{name!r} must be relative to the trial's directory and stay inside it")
        return name

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if sum(source is not None for source in (self.regex, self.json_pointer, self.resource)) != 1:
            raise ValueError("give exactly one of regex, json, resource")
        if self.resource is not None and self.file is not None:
            raise ValueError("`file` goes with regex or json, not with resource")
        return self

    def read(self, directory: Path, stdout: Path, usage: Mapping[str, float], timeout_s: float) -> float:
        """The value; raises MetricMissing if it cannot be read, PatternTimeout if matching takes too long."""
        if self.resource is not None:
            if self.resource not in usage:
                raise MetricMissing(f"{self.resource} is unknown, since it is below that of Loopwright's own process")
            return float(usage[self.resource])
        path = directory / self.file if self.file else stdout
        source = self.file or "stdout"
        if not path.is_file():
            raise MetricMissing(f"the command did not write {source}")
        if self.regex is None:
            text = _at_pointer(self.json_pointer or "", path, source)
        elif path.stat().st_size == 0:
            raise MetricMissing(f"{source} is empty")
        else:
            groups = deque(_matches(self.regex, path, source, timeout_s, group=1), maxlen=1)
            if not groups or groups[0] is None:
                raise MetricMissing(f"nothing in {source} matches {self.regex!r}")
            text = groups[0].decode(errors="replace")
        try:
            number = float(text)
        except (TypeError, ValueError) as error:
            raise MetricMissing(f"{text!r} in {source} is not a number") from error
        except OverflowError as error:
            raise MetricMissing(f"the number in {source} is not a finite number: {error}") from error
        if not math.isfinite(number):
            raise MetricMissing(f"{text!r} in {source} is not a finite number")
        return number


class SuccessConfig(Config):
    """When a command counts as successful."""

    exit_codes: tuple[int, ...] = (0,)
    """Exit codes that count as success."""
    regex: str | None = None
    """A pattern that standard output must also contain."""

    @field_validator("regex")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                regex.compile(pattern.encode())
            except regex.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return pattern


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
    """Metrics by name: `{ regex }` or `{ json }`, in stdout or in a `file`, or `{ resource }`."""
    success: SuccessConfig = SuccessConfig()
    """When a trial counts as `ok`: its exit code, and optionally its output."""

    @field_validator("command", "setup")
    @classmethod
    def _check_template(cls, text: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if text is not None:
            CommandTemplate(text)
        return text

    @field_validator("metrics")
    @classmethod
    def _check_names(cls, metrics: dict[str, MetricConfig]) -> dict[str, MetricConfig]:
        for name in metrics:
            if not name.isidentifier():
                raise ValueError(f"{name!r} cannot be used in an expression; use letters, digits and _")
        return metrics

    def metric_names(self) -> tuple[str, ...]:
        return tuple(self.metrics)

    def problems(self, scenario_dir: Path) -> list[Problem]:
        problems = super().problems(scenario_dir)
        parameters = {**self.args, **self.env}
        names: set[str] = set()
        for key, text in (("command", self.command), ("setup", self.setup)):
            if text is None:
                continue
            template = CommandTemplate(text)
            names |= template.names
            for name in sorted(template.names - parameters.keys()):
                hint = did_you_mean(name, list(parameters))
                problems.append(Problem(key, f"unknown argument {{{name}}}. {hint} Write literal braces twice."))
            for name in sorted(template.names & parameters.keys()):
                can_be_absent = parameters[name].when and parameters[name].otherwise is None
                if can_be_absent and (option := template.option_before(name)):
                    fix = f"write {option}={{{name}}} as one word, or give {name} an `otherwise`"
                    problems.append(Problem(key, f"{option} loses its value when {name} is absent; {fix}."))
            problems += self._unusable_values(template)
            problems += self._missing_program(key, template, scenario_dir)
        for name in sorted(self.args.keys() - names):
            if not isinstance(self.args[name], Fixed):
                problems.append(
                    Problem(f"args.{name}", f"is searched, but neither command nor setup contains {{{name}}}.")
                )
        return problems

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

    def _missing_program(self, key: str, template: CommandTemplate, scenario_dir: Path) -> list[Problem]:
        program = template.program
        if program is None or program.startswith("/"):
            is_missing = program is not None and not os.access(program, os.X_OK)
            return [Problem(key, f"{program!r} is not an executable file.")] if is_missing else []
        if "/" not in program:
            path = str(fixed.value) if isinstance(fixed := self.env.get("PATH"), Fixed) else None
            if shutil.which(program, path=path) is None:
                return [Problem(key, f"{program!r} is not on the PATH. Install it, or give its path in `files`.")]
            return []
        path = os.path.normpath(program)
        is_linked = any(Path(path).is_relative_to(os.path.normpath(name)) for name in self.files)
        if is_linked or (key == "command" and self.setup is not None):  # The setup may create it.
            return []
        fix = f"add it: files = [{path!r}]" if (scenario_dir / program).exists() else "it does not exist"
        return [Problem(key, f"{program!r} is not among the `files` linked into a trial's directory; {fix}.")]


class CommandWorkload(Workload):
    """Runs one command per trial through an executor, and its setup once per distinct set of arguments."""

    Config: ClassVar[type[WorkloadConfig]] = CommandConfig
    not_compared: ClassVar[set[str]] = Workload.not_compared | {"type", "setup_timeout_s"}
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
        self._setup_failures: dict[str, Result] = {}

    async def run(self, job: Job) -> Result:
        job.flush_reservation()
        fresh_directory(job.directory)
        with storage(job.directory):
            (job.directory / "parameters.json").write_bytes(job.parameters_json)
        if self.config.files:
            link_into(job.directory, self.site.scenario_dir, self.config.files)
        try:
            if self._setup is not None and (failure := await self._prepare(job, self._setup)) is not None:
                return failure
            command = Command(
                argv=tuple(self._command.words(job.arguments)),
                directory=job.directory,
                environment=self.environment(job.arguments),
                stdout=job.directory / "stdout",
                stderr=job.directory / "stderr",
                timeout_s=self.config.timeout_s,
                marker=job.marker,
            )
            completion = await self.executor.run(command, job.on_start)
        except LaunchError as error:
            if error.infra:
                return Result(Outcome.LOST, reason=str(error), fault=Fault.INFRA)
            return Result(Outcome.CRASHED, reason=str(error))
        try:
            return self._evaluate(job.directory, completion, _MATCH_NOW_S)
        except PatternTimeout:
            return await self._evaluate_in_thread(job.directory, completion)

    async def _evaluate_in_thread(self, directory: Path, completion: Completion) -> Result:
        """Evaluate a trial outside the event loop, so that others go on and signals are heard."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def evaluate() -> None:
            try:
                result = self._evaluate(directory, completion, _MATCH_S)
            except PatternTimeout as error:
                result = Result(Outcome.METRIC_MISSING, reason=str(error), usage=completion.usage)
            with suppress(RuntimeError):  # the run has ended without us
                loop.call_soon_threadsafe(finish, result)

        def finish(result: Result) -> None:
            if not done.done():  # the trial was aborted
                done.set_result(result)

        # Not the loop's executor, which a stopped run would wait for.
        threading.Thread(target=evaluate, name="loopwright-match", daemon=True).start()
        return await done

    async def _prepare(self, job: Job, setup: CommandTemplate) -> Result | None:
        """Run the setup if needed, and link its files into the trial's directory; returns its failure."""
        arguments = {name: job.arguments[name] for name in sorted(setup.names) if name in job.arguments}
        key = key_of(arguments, self._first_fingerprint)[:16]
        directory = self.site.directory / "setup" / key
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._setup_failures and not (directory / ".done").exists():
                failure = await self._run_setup(job, setup, arguments, directory)
                if failure is not None:
                    self._setup_failures[key] = failure
        if key in self._setup_failures:
            return self._setup_failures[key]
        with storage(job.directory):
            link_products(directory, job.directory, excluded=(*_NOT_LINKED, *RESERVED_FILES))
        return None

    @cached_property
    def _first_fingerprint(self) -> str:
        """The fingerprint before the first setup."""
        return self.fingerprint()

    async def _run_setup(
        self, job: Job, setup: CommandTemplate, arguments: Mapping[str, Any], directory: Path
    ) -> Result | None:
        recreate(directory)
        link_into(directory, self.site.scenario_dir, self.config.files)
        command = Command(
            argv=tuple(setup.words(arguments)),
            directory=directory,
            environment=self.environment(arguments),
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
        return Result(outcome, reason=f"the setup in setup/{directory.name} failed: {ending}")

    def _evaluate(self, directory: Path, completion: Completion, timeout_s: float) -> Result:
        """The result of a command that has ended. Raises PatternTimeout if a pattern takes longer than the timeout."""
        usage = completion.usage
        if completion.timed_out or completion.exit_code not in self.config.success.exit_codes:
            outcome = Outcome.TIMEOUT if completion.timed_out else Outcome.CRASHED
            return Result(outcome, reason=_ending(completion, self.config.timeout_s, directory / "stderr"), usage=usage)
        pattern = self.config.success.regex
        stdout = directory / "stdout"
        if pattern is not None and not _contains(pattern, stdout, timeout_s):
            return Result(Outcome.CRASHED, reason=f"stdout does not contain {pattern!r}", usage=usage)
        metrics: dict[str, float] = {}
        missing: list[str] = []
        for name, metric in self.config.metrics.items():
            try:
                metrics[name] = metric.read(directory, stdout, usage, timeout_s)
            except MetricMissing as error:
                missing.append(f"{name}: {error}")
            except PatternTimeout as error:
                raise PatternTimeout(f"{name}: {error}") from error
        if missing:
            return Result(Outcome.METRIC_MISSING, reason="; ".join(missing), usage=usage)
        return Result(Outcome.OK, metrics, usage=usage)

    async def close(self) -> None:
        await self.executor.close()

    def kill(self) -> None:
        self.executor.kill_all()


def _contains(pattern: str, stdout: Path, timeout_s: float) -> bool:
    if not stdout.is_file() or stdout.stat().st_size == 0:  # an empty file cannot be mapped
        return stdout.is_file() and regex.search(pattern.encode(), b"") is not None
    return any(True for _ in _matches(pattern, stdout, "stdout", timeout_s))


def _ending(completion: Completion, timeout_s: float | None, stderr: Path) -> str:
    """How a command ended, in words, with the last line of its stderr."""
    if completion.timed_out:
        ending = f"timed out after {timeout_s:g} s"
    elif completion.signal is not None:
        ending = f"ended by signal {completion.signal}"
    else:
        ending = f"exit code {completion.exit_code}"
    return f"{ending}; stderr ends with: {line}" if (line := last_line(stderr)) else ending


def _at_pointer(pointer: str, path: Path, source: str) -> Any:
    value = _load_json(path, source)
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        try:
            value = value[int(name)] if isinstance(value, list) else value[name]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise MetricMissing(f"the JSON in {source} has no {pointer!r}") from error
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise MetricMissing(f"{pointer!r} in {source} is {value!r}, not a number")
    return value


def _load_json(path: Path, source: str) -> Any:
    content = path.read_bytes()
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        pass
    # Programs often print their result as a last line of JSON.
    lines = content.rstrip().rsplit(b"\n", 1)
    try:
        return json.loads(lines[-1])
    except (ValueError, RecursionError) as error:
        raise MetricMissing(f"neither {source} nor its last line is JSON") from error
