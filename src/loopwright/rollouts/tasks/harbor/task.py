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
from loopwright.rollouts.tasks.sources import TasksError

TOML, INSTRUCTION, TEST = "task.toml", "instruction.md", "test.sh"
IGNORED_NAMES = ("__pycache__", ".DS_Store")
"""Files and directories that do not belong to a task, at any depth."""
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
WORKDIR = "/app"
"""The default working directory."""


class TaskChanged(TasksError):
    """A task's directory changed after the run started."""


class ImageRequired(TasksError):
    """A task that needs its own container image, which only `sandbox = "docker"` provides."""


class _Part(BaseModel):
    """A table of Harbor's format; keys that we do not use are ignored."""

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
    """An instruction and how its result is checked. Most tasks have one step, without a name."""

    name: str
    instruction: str
    agent_timeout_s: float | None
    verifier_timeout_s: float
    verifier_env: Mapping[str, str]
    min_rewards: Mapping[str, float] = field(default_factory=dict)
    """The rewards that the next step requires."""

    def allows_next(self, results: Mapping[str, Any]) -> bool:
        """Whether the next step may start after these test results."""
        rewards = results.get("rewards", {})
        return all(rewards.get(name, float("-inf")) >= least for name, least in self.min_rewards.items())


@dataclass(frozen=True, slots=True)
class HarborTask:
    """The contents of a task directory."""

    path: Path
    digest: str
    """A hash of all its files."""
    steps: tuple[TaskStep, ...]
    workdir: str | None
    env: Mapping[str, str]
    solution_env: Mapping[str, str]
    metadata: Mapping[str, Any]
    strategy: Literal["mean", "final"]
    docker_image: str | None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a task directory; a TasksError names the file and the key that is wrong."""
        digest = directory_digest(path)
        toml = _parse(path / TOML)
        _check_supported(toml, path / TOML)
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
    def needs_image(self) -> bool:
        """Whether its image matters; `needs_image = false` in its metadata says that any machine's programs will do."""
        return self.metadata.get("needs_image") is not False

    @property
    def has_tests(self) -> bool:
        """Whether each step has tests."""
        return all(self.test_directories(step) for step in self.steps)

    def test_directories(self, step: TaskStep) -> list[Path]:
        """The directories that are merged into a step's /tests, the later over the earlier; empty without a test.sh."""
        candidates = [self.path / "tests", self.path / "steps" / step.name / "tests"][: 2 if step.name else 1]
        has_script = any((each / TEST).is_file() for each in candidates)
        return [each for each in candidates if each.is_dir()] if has_script else []

    def solution(self, step: TaskStep) -> Path | None:
        """The directory with the solve.sh of a step, if there is one."""
        candidates = [self.path / "steps" / step.name / "solution"] if step.name else []
        candidates.append(self.path / "solution")
        return next((each for each in candidates if (each / "solve.sh").is_file()), None)

    def agent_env(self) -> dict[str, str]:
        """The variables of its environment; TasksError if one refers to a variable that is not set."""
        return resolve_env(self.env, f"{self.path / TOML}: environment.env")

    def tests_env(self, step: TaskStep) -> dict[str, str]:
        """The additional variables of a step's tests; TasksError as for `agent_env`."""
        return resolve_env(step.verifier_env, f"{self.path / TOML}: verifier.env")

    def check_variables(self) -> None:
        """Raise TasksError if a variable that the agent or any tests need is not set."""
        self.agent_env()
        for step in self.steps:
            self.tests_env(step)

    def files(self, step: TaskStep) -> Path | None:
        """The directory of files that are copied into the workspace before a step starts."""
        directory = self.path / "steps" / step.name / "workdir"
        return directory if step.name and directory.is_dir() else None


def _parse(file: Path) -> _Toml:
    try:
        raw = tomllib.loads(file.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TasksError(f"{file}: {error}") from error
    except OSError as error:
        raise TasksError(f"{file} cannot be read: {error.strerror}") from error
    try:
        return _Toml.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(f"{key}: {message}" for key, message in explain(error, _Toml))
        raise TasksError(f"{file}: {problems}") from error


def _check_supported(toml: _Toml, file: Path) -> None:
    """Raise TasksError for features of Harbor that are not supported here."""
    if toml.environment.os.lower() != "linux":
        raise TasksError(f"{file}: environment.os: {toml.environment.os!r} is not supported, only 'linux'")
    for where, verifier in [("", toml.verifier), *((f"steps.{s.name}.", s.verifier) for s in toml.steps)]:
        if verifier.environment_mode == "separate" or verifier.environment is not None:
            raise TasksError(
                f"{file}: {where}verifier.environment: separate test containers are only supported by Harbor itself"
            )
    names = [step.name for step in toml.steps]
    for setup in (file.parent / "steps" / name / "workdir" / "setup.sh" for name in names):
        if setup.exists():
            raise TasksError(f"{setup}: setup scripts of steps are only supported by Harbor itself")
    if duplicates := {name for name in names if names.count(name) > 1}:
        raise TasksError(f"{file}: steps: two steps are called {duplicates.pop()!r}; give each a unique name")


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
        raise TasksError(f"{file} cannot be read: {error.strerror}. It must contain the agent's instruction") from error
    if not text.strip():
        raise TasksError(f"{file} is empty. It must contain the agent's instruction")
    return text.strip()


def resolve_env(env: Mapping[str, str], where: str) -> dict[str, str]:
    """Replace values `${NAME}` and `${NAME:-default}` by variables of this process, as Harbor does."""

    def resolve(value: str) -> str:
        match = _TEMPLATE.fullmatch(value)
        if match is None:
            return value
        return os.environ[match[1]] if match[2] is None else os.environ.get(match[1], match[2])

    try:
        return {name: resolve(value) for name, value in env.items()}
    except KeyError as error:
        raise TasksError(f"{where} needs the environment variable {error.args[0]}, which is not set") from None


def walk_tree(
    path: Path, ignored: tuple[str, ...] = (*IGNORED_NAMES, ".git")
) -> Iterator[tuple[str, Path, os.stat_result]]:
    """Everything below a task directory that belongs to the task: relative name, path and status, in order.

    A `.git` further down is part of the task: a repository for the agent to work on.
    """
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.name not in ignored:
            status = entry.stat(follow_symlinks=False)
            yield entry.name, Path(entry.path), status
            if stat.S_ISDIR(status.st_mode):
                for name, inner, inner_status in walk_tree(Path(entry.path), IGNORED_NAMES):
                    yield f"{entry.name}/{name}", inner, inner_status


def directory_digest(path: Path) -> str:
    """A hash of all files of a task: names, contents and execute permissions."""
    digest = blake2b(digest_size=16)
    try:
        for name, file, status in walk_tree(path):
            kind, content = stat.S_IFMT(status.st_mode), b""
            if kind == stat.S_IFREG:
                content = _file_digest(file, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
            elif kind == stat.S_IFLNK:
                content = os.fsencode(file.readlink())
            digest.update(repr((name, kind, status.st_mode & 0o111, content)).encode(errors="surrogateescape"))
    except OSError as error:
        raise TasksError(f"{error.filename or path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


@lru_cache(maxsize=100_000)
def _file_digest(path: Path, *_status: int) -> bytes:
    """A hash of a file; it is read again only if its status has changed."""
    with path.open("rb") as file:
        return file_digest(file, lambda: blake2b(digest_size=16)).digest()
