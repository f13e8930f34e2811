"""The base of all workloads: what a trial runs, and the parameters it takes."""

import os
import re
import shlex
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Literal

import orjson
from pydantic import Field, field_validator

from loopwright.core.config import Config
from loopwright.core.errors import LaunchError, Problem, storage
from loopwright.core.expression import Expression
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.progress import Reporter
from loopwright.core.registry import Registry
from loopwright.core.trial import Result
from loopwright.execution.base import OnStart
from loopwright.execution.local.system import LocalSystem
from loopwright.execution.system import SystemConfig
from loopwright.spaces.parameter import Fixed, Parameter, parameter, parameters
from loopwright.spaces.space import Space

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)(?::([A-Za-z]*))?\}")
RESERVED_FILES = ("parameters.json", "stdout", "stderr")
"""Files of each trial's directory that inputs and products must not replace."""


class WorkloadConfig(Config):
    """Settings of every workload."""

    type: str
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments: a value is fixed, a list is searched, `{ low, high, dtype, log, points }` is a range;
    `when` and `otherwise` make one conditional, `{ value = … }` fixes a list or a table. Those of any other table have
    dotted names: `trainer = { lr = [0.1, 0.2] }` is the argument `trainer.lr`."""
    env: dict[str, Any] = Field(default_factory=dict)
    """Environment variables, written like arguments: they are searched too."""
    constraints: tuple[str, ...] = ()
    """Expressions over arguments and environment variables; an action that violates one is `infeasible`."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds after which a trial's process tree is ended."""
    nodes: Any = None
    """How many nodes each trial takes, on a cluster; a list is searched, as `{nodes}`."""
    gpus: int = Field(default=0, ge=0)
    """How many GPUs each trial has to itself; on a cluster, on each of its nodes."""
    keep: Literal["all", "best", "failed"] = "all"
    """Which directories of trials stay: all, those of the best trials, or those of failed ones."""
    files: tuple[str, ...] = ()
    """Input files, relative to the scenario: linked into each trial's directory, and part of the fingerprint."""

    @field_validator("args", "env")
    @classmethod
    def _parse_parameters(cls, values: dict[str, Any]) -> dict[str, Parameter]:
        return dict(parameters(values))

    @field_validator("constraints")
    @classmethod
    def _parse_constraints(cls, constraints: tuple[str, ...]) -> tuple[str, ...]:
        for constraint in constraints:
            Expression(constraint)
        return constraints

    @field_validator("nodes")
    @classmethod
    def _parse_nodes(cls, value: Any) -> Parameter | None:
        nodes = None if value is None else parameter(value)
        if nodes is not None and not all(type(count) is int and count > 0 for count in nodes.grid()):
            raise ValueError(f"{value!r} is not a number of nodes: give 2, or a list such as [1, 2, 4]")
        return nodes

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Everything that can be searched: arguments, environment variables and, if it is set, `nodes`."""
        return {**self.args, **self.env, **({} if self.nodes is None else {"nodes": self.nodes})}

    def space(self, env_params: frozenset[str] = frozenset()) -> Space:
        """The parameters of this workload as a space; the environment draws `env_params`."""
        return Space(self.parameters, self.constraints, env_params)

    def metric_names(self) -> tuple[str, ...] | None:
        """The metrics of a trial, in order; None if they are unknown before it runs."""
        return None

    def local_only(self) -> list[str]:
        """The keys that need processes on this machine."""
        return []

    def unused_arguments(self) -> list[str]:
        """The arguments with several values that no trial would receive."""
        return []

    def missing_programs(self, scenario_dir: Path) -> list[Problem]:
        """The programs of a trial that this machine does not have. Another machine may have them."""
        return []

    def problems(self, scenario_dir: Path) -> list[Problem]:
        """All problems that can be detected without running a trial."""
        problems = [
            Problem("files", f"{name!r} does not exist in {scenario_dir}. Give a path relative to the scenario.")
            for name in self.files
            if not (scenario_dir / name).exists()
        ]
        problems += [
            Problem("files", f"{name!r} would replace {Path(name).name} in each trial's directory; rename it.")
            for name in self.files
            if Path(name).name in RESERVED_FILES and (len(Path(name).parts) == 1 or not _is_inside(name))
        ]
        problems += [
            Problem("env", f"{name!r} is also an argument; rename one of them.")
            for name in self.args.keys() & self.env.keys()
        ]
        if self.nodes is not None and "nodes" in {*self.args, *self.env}:
            problems.append(Problem("nodes", "is also an argument; rename that one."))
        for where, text in (
            *(("constraints", constraint) for constraint in self.constraints),
            *((f"args.{name}", p.when) for name, p in self.parameters.items() if p.when is not None),
        ):
            unknown = sorted(Expression(text).names - self.parameters.keys())
            if unknown:
                available = ", ".join(sorted(self.parameters)) or "none"
                problems.append(
                    Problem(where, f"{text!r}: unknown parameter {', '.join(unknown)}. Known parameters: {available}.")
                )
        return problems


@dataclass(frozen=True)
class Job:
    """One trial for a workload to run."""

    trial: int
    directory: Path
    arguments: Mapping[str, Any]
    parameters_json: bytes
    """The content of the trial's parameters.json."""
    marker: str
    """Identifies the trial's processes; see `Command.marker`."""
    on_start: OnStart
    """Records each process or job, so that it can be ended or adopted after a crash."""
    on_services: Callable[[Sequence[str]], None] = lambda _: None
    """Records the processes of all services that run now, likewise."""
    checkpoint: Path | None = None
    """A directory that all attempts at a trial's fidelities share; by default one in the trial's own."""
    report: Reporter | None = None
    """Takes a step and its metrics while the trial runs. If it returns True, end the trial: it is `stopped`."""
    flush_reservation: Callable[[], None] = lambda: None
    """Writes the trial's reservation to disk. Call it before a process is started, unless `on_start` comes first."""
    is_retry: bool = True
    """Whether an earlier attempt may have left something behind."""
    handle: str = ""
    """The job that an earlier process submitted for this attempt; the workload continues with it."""


class Workload(ABC):
    """Runs trials. A failure is a result; an exception is a bug or a full disk.

    class Sleep(Workload):
        Config = SleepConfig

        async def run(self, job: Job) -> Result:
            await asyncio.sleep(job.arguments["seconds"])
            return Result(Outcome.OK, {"seconds": job.arguments["seconds"]})
    """

    Config: ClassVar[type[WorkloadConfig]] = WorkloadConfig

    not_compared: ClassVar[set[str]] = {"args", "env", "constraints", "timeout_s", "gpus", "keep", "nodes"}
    """Settings that are not part of the fingerprint. A timeout does not change a successful result."""

    def __init__(self, config: Any, site: "Site") -> None:
        self.config, self.site = config, site
        fixed = {name: as_text(p.value) for name, p in config.env.items() if isinstance(p, Fixed)}
        self._fixed_environment = {**os.environ, **fixed}

    @abstractmethod
    async def run(self, job: Job) -> Result:
        """Run a trial in its directory. Cancellation ends its whole process tree."""

    def fingerprint(self, *sources: Path) -> str:
        """Identifies comparable measurements: the workload, and the contents of its input files and of `sources`."""
        files = [self.site.scenario_dir / name for name in self.config.files]
        return fingerprint_of(self.config.model_dump_json(exclude=self.not_compared), *files, *sources)

    def environment(self, arguments: Mapping[str, Any]) -> Mapping[str, str]:
        """The environment of a trial's processes: that of this process, and the variables of `env`."""
        if not self.config.env:
            return self._fixed_environment
        variables = {name: as_text(arguments[name]) for name in self.config.env if name in arguments}
        return {**self._fixed_environment, **variables}

    async def close(self) -> None:
        """Release all resources."""

    def kill(self) -> None:
        """Kill all running trials immediately; called from a signal handler."""


@dataclass(frozen=True)
class Site:
    """Where a workload runs: the directories of the scenario and of the run, and the system."""

    scenario_dir: Path
    directory: Path
    system: SystemConfig = field(default_factory=LocalSystem)


def launch_failure(error: LaunchError) -> Result:
    """The result of a trial that could not be started, or that was lost."""
    if not error.infra:
        return Result(Outcome.CRASHED, reason=str(error))
    return Result(Outcome.ABORTED if error.cancelled else Outcome.LOST, reason=str(error), fault=Fault.INFRA)


def as_text(value: Any) -> str:
    """A value as it is written on a command line."""
    match value:
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
    return orjson.dumps(value).decode()


_SHELL_OPERATORS = {"|", "||", "&&", ">", ">>", "<", "2>", "2>&1", "&>"}


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
        # With their quotes: a quoted operator is an ordinary argument.
        raw = shlex.split(text, posix=False) if isinstance(text, str) else ()
        ends = {";" for word in raw if word.endswith(";") and not word.endswith("\\;")}
        self.operators = sorted(_SHELL_OPERATORS & set(raw) | ends)
        """The unquoted words that only a shell understands."""

    @property
    def program(self) -> str | None:
        """The program to run; None if it contains a placeholder."""
        first = self._words[0]
        return None if any(m[1] for m in _PLACEHOLDER.finditer(first)) else first

    def option_before(self, name: str) -> str | None:
        """The option before the word `{name}`, or before a script with it: absent, the option would lose its value."""
        placeholders = f"{{{name}}}", f"{{{name}:words}}"
        for option, word in zip(self._words, self._words[1:], strict=False):
            if word in placeholders and option.startswith("-") and "=" not in option:
                return option
            if option == "-c" and any(placeholder in word for placeholder in placeholders):
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


def fingerprint_of(text: str, *paths: Path) -> str:
    """A hash of a text and the contents of files and directories."""
    digest = blake2b(text.encode(), digest_size=16)
    for path in paths:
        members = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for member in members:
            digest.update(f"\0{member.relative_to(path.parent)}\0".encode())
            with member.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()


def fresh_directory(directory: Path) -> None:
    """Create a trial's directory; that of an earlier attempt is renamed."""
    with storage(directory):
        try:
            directory.mkdir()
        except FileNotFoundError:
            directory.mkdir(parents=True)
        except FileExistsError:
            attempt = 1
            while (backup := directory.with_name(f"{directory.name}.attempt-{attempt}")).exists():
                attempt += 1
            directory.rename(backup)
            directory.mkdir()


def _is_inside(name: str) -> bool:
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def link_into(directory: Path, scenario_dir: Path, names: tuple[str, ...]) -> None:
    """Link input files into a directory by their relative paths."""
    with storage(directory):
        for name in names:
            source = (scenario_dir / name).absolute()
            target = directory / (name if _is_inside(name) else source.name)
            if target.parent != directory:
                target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)


def link_products(source: Path, target: Path, excluded: tuple[str, ...] = ()) -> None:
    """Link the files of the setup; if the input files include a directory of the same name, into that directory."""
    for product in source.iterdir():
        path = target / product.name
        if path.is_dir() and not path.is_symlink() and not product.is_symlink():
            link_products(product, path)
        elif product.name not in excluded and not path.is_symlink():
            path.symlink_to(product)


def recreate(directory: Path) -> None:
    """Create an empty directory; what is there was left by an interrupted setup."""
    with storage(directory):
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(parents=True)


def last_lines(path: Path, count: int = 3) -> list[str]:
    """The end of a file that a command wrote, for an error message; empty if there is none."""
    if not path.is_file():  # A command may delete its own directory.
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 400 * count))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return [line.strip()[:300] for line in lines[-count:]]


workloads: Registry[type[Workload]] = Registry("workload", "loopwright.workloads", Workload)
workloads.add_lazily("command", "loopwright.workloads.command:CommandWorkload")
workloads.add_lazily("python", "loopwright.workloads.python:PythonWorkload")
workloads.add_lazily("external", "loopwright.workloads.in_process:ExternalWorkload")
