"""The base of all workloads: what a trial runs, and the parameters that it takes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from loopwright.core.config import Config
from loopwright.core.errors import Problem, storage
from loopwright.core.expression import Expression
from loopwright.core.registry import Registry
from loopwright.core.trial import Result
from loopwright.spaces.parameter import Parameter, parameter
from loopwright.spaces.space import Space

KEPT = ("parameters.json", "stdout", "stderr")
"""What a trial's directory holds beside its inputs and what it made itself."""


class WorkloadConfig(Config):
    """What every workload can be told."""

    type: str
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments: a value is fixed, a list is searched, `{ low, high, dtype, log, points }` is a range;
    `{ values | low, high, when, otherwise }` makes one conditional, `{ value = … }` fixes a list or a table."""
    env: dict[str, Any] = Field(default_factory=dict)
    """Environment variables, written like arguments: they are dimensions too."""
    constraints: tuple[str, ...] = ()
    """Expressions over arguments and environment variables; an action that breaks one is `infeasible`."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds after which a trial's whole process tree is ended."""
    files: tuple[str, ...] = ()
    """Inputs, relative to the scenario: linked into each trial's directory, and part of the fingerprint."""

    @field_validator("args", "env")
    @classmethod
    def _parameters(cls, written: dict[str, Any]) -> dict[str, Parameter]:
        wrong, good = [], {}
        for name, value in written.items():
            try:
                good[name] = parameter(value)
            except ValueError as error:
                wrong.append(f"{name}: {error}")
        if wrong:
            raise ValueError("; ".join(wrong))
        return good

    @field_validator("constraints")
    @classmethod
    def _parse(cls, constraints: tuple[str, ...]) -> tuple[str, ...]:
        for constraint in constraints:
            Expression(constraint)
        return constraints

    def space(self, drawn: frozenset[str] = frozenset()) -> Space:
        """The parameters of this workload as a space; `drawn` are chosen by the environment."""
        return Space({**self.args, **self.env}, self.constraints, drawn)

    def metric_names(self) -> tuple[str, ...] | None:
        """The metrics that a trial gives, in order; None if only running it can tell."""
        return None

    def problems(self, home: Path) -> list[Problem]:
        """Everything that can be found wrong without running; `home` is the scenario's directory."""
        found = [
            Problem("files", f"{name!r} does not exist in {home}. Give a path relative to the scenario.")
            for name in self.files
            if not (home / name).exists()
        ]
        found += [
            Problem("files", f"{name!r} would stand where each trial's own {Path(name).name} is kept; rename it.")
            for name in self.files
            if Path(name).name in KEPT and (len(Path(name).parts) == 1 or not _inside(name))
        ]
        known = {*self.args, *self.env}
        found += [
            Problem("env", f"{name!r} is an argument as well; give one of them another name.")
            for name in self.args.keys() & self.env.keys()
        ]
        for where, text in (
            *(("constraints", constraint) for constraint in self.constraints),
            *((f"args.{name}", p.when) for name, p in {**self.args, **self.env}.items() if p.when is not None),
        ):
            unknown = sorted(Expression(text).names - known)
            if unknown:
                listed = ", ".join(sorted(known)) or "none"
                found.append(Problem(where, f"{text!r} names {', '.join(unknown)}. Known parameters: {listed}."))
        return found


@dataclass(frozen=True)
class Job:
    """One trial as a workload sees it. `on_start` records each process, so that it can be ended after a crash."""

    trial: int
    directory: Path
    arguments: Mapping[str, Any]
    parameters_json: bytes
    marker: str
    on_start: Callable[[int, int], None]
    flush_reservation: Callable[[], None] = lambda: None
    """Writes the reservation to disk. Call it before starting a process that `on_start` does not record first."""
    is_retry: bool = True
    """Whether an earlier attempt may have left something behind."""


class Workload(ABC):
    """Runs jobs. A failure is a result; an exception is a bug or a full disk.

    class Sleep(Workload):
        Config = SleepConfig

        async def run(self, job: Job) -> Result:
            await asyncio.sleep(job.arguments["seconds"])
            return Result(Outcome.OK, {"seconds": job.arguments["seconds"]})
    """

    Config: ClassVar[type[WorkloadConfig]] = WorkloadConfig

    def __init__(self, config: Any, site: "Site") -> None:
        self.config, self.site = config, site

    @abstractmethod
    async def run(self, job: Job) -> Result:
        """Run a trial in its own directory. Cancellation ends its whole process tree."""

    def fingerprint(self) -> str:
        """What makes two measurements comparable: the workload and the contents of its inputs."""
        return fingerprint_of(
            self.config.model_dump_json(exclude={"args", "env", "constraints", "timeout_s"}), *self.inputs()
        )

    def inputs(self) -> list[Path]:
        """The files that the fingerprint covers."""
        return [self.site.scenario_dir / name for name in self.config.files]

    def open(self) -> None:
        """Get ready, inside the event loop of the run."""

    async def close(self) -> None:
        """Let go of everything."""

    def kill(self) -> None:
        """End all that runs, at once; called from a signal handler."""


@dataclass(frozen=True)
class Site:
    """Where a workload runs: the scenario's directory, the run's own, and what the system allows."""

    scenario_dir: Path
    directory: Path
    parallel: int = 1
    pin_cpus: bool = False
    memory_bytes: int | None = None
    output_bytes: int = 64 * 2**20
    grace_s: float = 2.0


def fingerprint_of(text: str, *paths: Path) -> str:
    """A hash over a text and the contents of files and directories."""
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
    """Make a trial's directory; what an earlier attempt left there is moved aside, not mixed in."""
    with storage(directory):
        try:
            directory.mkdir()
        except FileNotFoundError:
            directory.mkdir(parents=True)
        except FileExistsError:
            attempt = 1
            while (aside := directory.with_name(f"{directory.name}.attempt-{attempt}")).exists():
                attempt += 1
            directory.rename(aside)
            directory.mkdir()


def _inside(name: str) -> bool:
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def link_into(directory: Path, home: Path, names: tuple[str, ...]) -> None:
    """Link inputs into a directory under their own relative names."""
    with storage(directory):
        for name in names:
            source = (home / name).absolute()
            target = directory / (name if _inside(name) else source.name)
            if target.parent != directory:
                target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)


workloads: Registry[type[Workload]] = Registry("workload", "loopwright.workloads", Workload)
workloads.add_lazily("command", "loopwright.workloads.command:CommandWorkload")
workloads.add_lazily("python", "loopwright.workloads.python:PythonWorkload")
