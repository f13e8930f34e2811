"""One Harbor task: a directory with `task.toml`, `instruction.md`, and whatever files, tests and solution it has."""

import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loopwright.core.config import explain
from loopwright.rollouts.tasks.base import TasksError

TOML, INSTRUCTION, TEST = "task.toml", "instruction.md", "test.sh"
PASSED_OVER = ("__pycache__", ".DS_Store")
"""What is no part of a task, wherever it lies in it."""
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
WORKDIR = "/app"
"""Where a task is at work if it does not say."""


class TaskChanged(TasksError):
    """A task's directory is not what it was when the run began."""


class _Part(BaseModel):
    """Somebody else's format: what we do not read may be anything."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, strict=True)


class _Agent(_Part):
    timeout_sec: float | None = Field(default=None, gt=0)


class _Verifier(_Part):
    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: Literal["shared", "separate"] | None = None
    environment: dict[str, Any] | None = None


class _Environment(_Part):
    docker_image: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = Field(default=None, pattern="^/.+")
    os: str = "linux"


class _Solution(_Part):
    env: dict[str, str] = Field(default_factory=dict)


class _Step(_Part):
    name: str = Field(pattern=r"^[\w][\w. -]*$")
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    min_reward: float | dict[str, float] | None = None


class _Toml(_Part):
    metadata: dict[str, Any] = Field(default_factory=dict)
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()
    solution: _Solution = _Solution()
    steps: list[_Step] = Field(default_factory=list)
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"


@dataclass(frozen=True, slots=True)
class TaskStep:
    """What an agent is asked to do and how that is checked. Most tasks have one step, which has no name."""

    name: str
    instruction: str
    agent_timeout_s: float | None
    verifier_timeout_s: float
    verifier_env: Mapping[str, str]
    needed: Mapping[str, float] = field(default_factory=dict)
    """The rewards below which the next step is not begun."""

    def goes_on(self, said: Mapping[str, Any]) -> bool:
        """Whether, after what its tests said, the next step can be begun."""
        rewards = said.get("rewards", {})
        return all(rewards.get(name, float("-inf")) >= least for name, least in self.needed.items())


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task directory as it was read."""

    path: Path
    digest: str
    """Of every file in it."""
    steps: tuple[TaskStep, ...]
    workdir: str | None
    env: Mapping[str, str]
    solution_env: Mapping[str, str]
    metadata: Mapping[str, Any]
    strategy: Literal["mean", "final"]
    docker_image: str | None

    @classmethod
    def read(cls, path: Path) -> Self:
        """The task in this directory; a TasksError names the file and the key that is wrong."""
        digest = digest_of(path)
        toml = _parse(path / TOML)
        _refuse(toml, path / TOML)
        return cls(
            path,
            digest,
            tuple(_steps(toml, path)),
            toml.environment.workdir,
            toml.environment.env,
            toml.solution.env,
            toml.metadata,
            toml.multi_step_reward_strategy,
            toml.environment.docker_image,
        )

    @property
    def tested(self) -> bool:
        """Whether each step has tests."""
        return all(self.test_directories(step) for step in self.steps)

    def test_directories(self, step: TaskStep) -> list[Path]:
        """The directories that make up a step's /tests, the later over the earlier; none without a test.sh."""
        mine = [self.path / "tests", self.path / "steps" / step.name / "tests"][: 2 if step.name else 1]
        return [each for each in mine if each.is_dir()] if any((each / TEST).is_file() for each in mine) else []

    def solution(self, step: TaskStep) -> Path | None:
        """The directory with the solve.sh of a step, where there is one."""
        mine = [self.path / "steps" / step.name / "solution"] if step.name else []
        return next((each for each in [*mine, self.path / "solution"] if (each / "solve.sh").is_file()), None)

    def agent_env(self) -> dict[str, str]:
        """The variables of its environment; TasksError if one that they are taken from is not set."""
        return resolved(self.env, f"{self.path / TOML}, environment.env")

    def tests_env(self, step: TaskStep) -> dict[str, str]:
        """The variables of a step's tests alone; TasksError likewise."""
        return resolved(step.verifier_env, f"{self.path / TOML}, verifier.env")

    def check_variables(self) -> None:
        """TasksError if one is not set that the agent or any tests need."""
        self.agent_env()
        for step in self.steps:
            self.tests_env(step)

    def files(self, step: TaskStep) -> Path | None:
        """The directory of files that are put into the workspace before a step begins."""
        mine = self.path / "steps" / step.name / "workdir"
        return mine if step.name and mine.is_dir() else None


def _parse(file: Path) -> _Toml:
    try:
        with file.open("rb") as opened:
            raw = tomllib.load(opened)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TasksError(f"{file}: {error}") from error
    except OSError as error:
        raise TasksError(f"{file} cannot be read: {error.strerror}") from error
    try:
        return _Toml.model_validate(raw)
    except ValidationError as error:
        found = "; ".join(f"{key}: {message}" for key, message in explain(error, _Toml))
        raise TasksError(f"{file}, {found}") from error


def _refuse(toml: _Toml, file: Path) -> None:
    """What Harbor can do and we cannot: better said than done in part."""
    if toml.environment.os.lower() != "linux":
        raise TasksError(f"{file}, environment.os: {toml.environment.os!r} cannot be run here, only 'linux'")
    for where, verifier in [("", toml.verifier), *((f"steps.{s.name}.", s.verifier) for s in toml.steps)]:
        if verifier.environment_mode == "separate" or verifier.environment is not None:
            raise TasksError(
                f"{file}, {where}verifier.environment: tests in a container of their own need Harbor itself"
            )
    names = [step.name for step in toml.steps]
    for setup in (file.parent / "steps" / name / "workdir" / "setup.sh" for name in names):
        if setup.exists():
            raise TasksError(f"{setup}: steps with a setup script need Harbor itself")
    if twice := {name for name in names if names.count(name) > 1}:
        raise TasksError(f"{file}, steps: two are called {twice.pop()!r}; each needs a name of its own")


def _steps(toml: _Toml, path: Path) -> Iterator[TaskStep]:
    if not toml.steps:
        verifier = toml.verifier
        yield TaskStep("", _text(path / INSTRUCTION), toml.agent.timeout_sec, verifier.timeout_sec, verifier.env)
    for step in toml.steps:
        least = step.min_reward
        yield TaskStep(
            step.name,
            _text(path / "steps" / step.name / INSTRUCTION),
            step.agent.timeout_sec or toml.agent.timeout_sec,
            step.verifier.timeout_sec if "timeout_sec" in step.verifier.model_fields_set else toml.verifier.timeout_sec,
            {**toml.verifier.env, **step.verifier.env},
            least if isinstance(least, dict) else {} if least is None else {"reward": least},
        )


def _text(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TasksError(f"{file} is not UTF-8: {error}") from error
    except OSError as error:
        raise TasksError(f"{file} cannot be read: {error.strerror}. It is what the agent is told to do") from error
    if not text.strip():
        raise TasksError(f"{file} is empty. It is what the agent is told to do")
    return text.strip()


def resolved(env: Mapping[str, str], where: str) -> dict[str, str]:
    """Variables that are `${NAME}` or `${NAME:-default}` taken from our own environment, as Harbor does."""
    try:
        return {name: _own(value) for name, value in env.items()}
    except KeyError as error:
        raise TasksError(f"{where} needs the environment variable {error.args[0]}, which is not set") from None


def _own(value: str) -> str:
    match = _TEMPLATE.fullmatch(value)
    if match is None:
        return value
    return os.environ[match[1]] if match[2] is None else os.environ.get(match[1], match[2])


def tree(path: Path, over: tuple[str, ...] = (*PASSED_OVER, ".git")) -> Iterator[tuple[str, Path, os.stat_result]]:
    """Everything below a directory that is part of a task: its name from there, itself and what it is; in order.

    Deeper down, a repository is something for an agent to work on.
    """
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.name not in over:
            found = entry.stat(follow_symlinks=False)
            yield entry.name, Path(entry.path), found
            if stat.S_ISDIR(found.st_mode):
                below = tree(Path(entry.path), PASSED_OVER)
                yield from ((f"{entry.name}/{name}", inner, about) for name, inner, about in below)


def digest_of(path: Path) -> str:
    """A hash of all files of a task: names, contents, rights to execute."""
    total = blake2b(digest_size=16)
    try:
        for name, file, found in tree(path):
            kind, content = stat.S_IFMT(found.st_mode), b""
            if kind == stat.S_IFREG:
                content = _content(file, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
            elif kind == stat.S_IFLNK:
                content = os.fsencode(file.readlink())
            total.update(repr((name, kind, found.st_mode & 0o111, content)).encode(errors="surrogateescape"))
    except OSError as error:
        raise TasksError(f"{error.filename or path} cannot be read: {error.strerror}") from error
    return total.hexdigest()


@lru_cache(maxsize=100_000)
def _content(file: Path, *_about: int) -> bytes:
    """A file's hash; it is read again only where what the system says about it has changed."""
    with file.open("rb") as opened:
        return file_digest(opened, lambda: blake2b(digest_size=16)).digest()
