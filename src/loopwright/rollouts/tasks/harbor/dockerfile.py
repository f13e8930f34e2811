"""The workspace of a task: in the task's own image, or without Docker its files, or what its Dockerfile copies."""

import json
import os
import re
import shlex
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from loopwright.execution.sandbox.base import ImageStore
from loopwright.rollouts.tasks.harbor.task import (
    IGNORED_NAMES,
    TOML,
    WORKDIR,
    HarborTask,
    ImageRequired,
    directory_digest,
)
from loopwright.rollouts.tasks.sources import TasksError

_IRRELEVANT = frozenset({"LABEL", "MAINTAINER", "EXPOSE", "CMD", "ENTRYPOINT", "STOPSIGNAL", "SHELL"})
"""Instructions that affect neither the files nor the variables of an agent."""
_QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\"""")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^${}]*))?\})?")
_FIX = 'needs Docker. Use sandbox = "docker"'
_LITERAL_DOLLAR = "\0"
"""Placeholder for a dollar sign that does not start a variable."""
_OR_DECLARE = "or set needs_image = false in the task's [metadata] if any machine's programs will do"
_COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml")


@dataclass(frozen=True, slots=True)
class WorkspaceLayout:
    """The state in which an agent starts: its working directory, its variables, and the files that are copied."""

    workdir: str
    env: dict[str, str]
    copies: tuple[tuple[Path, PurePosixPath], ...]
    """Files and directories of the task, with their targets in the workspace. A directory's contents are copied."""
    image: str | None = None
    """The task's own image, in which its commands run."""

    def copy_into(self, workspace: Path) -> None:
        """Copy all files into the workspace."""
        for source, relative in self.copies:
            target = workspace / relative
            if source.is_dir():
                ignored = shutil.ignore_patterns(*IGNORED_NAMES)
                shutil.copytree(source, target, symlinks=True, ignore=ignored, dirs_exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)


def read_layout(task: HarborTask, images: ImageStore | None = None) -> WorkspaceLayout:
    """The layout of a task, in its own image if there are images.

    Without any, ImageRequired names its image, or the line of its Dockerfile, that needs Docker. This machine's
    programs take the place of an image only if the task says that they will do.
    """
    directory = task.path / "environment"
    for name in _COMPOSE_FILES:
        if (directory / name).exists():
            raise TasksError(f"{directory / name}: several containers are only supported by Harbor itself")
    has_dockerfile = (directory / "Dockerfile").is_file()
    # Without a Dockerfile, Harbor copies these files into the working directory of the task's image.
    copies = ((directory, PurePosixPath()),) if directory.is_dir() and not has_dockerfile else ()
    if images is not None and (task.docker_image or has_dockerfile):
        image = (
            images.pull(task.docker_image)
            if task.docker_image
            else images.build(directory, directory_digest(directory))
        )
        return WorkspaceLayout(task.workdir or image.workdir or WORKDIR, dict(image.env), copies, image.name)
    if task.docker_image and task.needs_image:
        raise ImageRequired(
            f"{task.path / TOML}, environment.docker_image: {task.docker_image!r} {_FIX}, {_OR_DECLARE}"
        )
    if has_dockerfile:
        return _DockerfileReader(directory, task).layout()
    return WorkspaceLayout(task.workdir or WORKDIR, {}, copies)


class _DockerfileReader:
    """Reads the part of a Dockerfile that needs no Docker: WORKDIR, ENV, ARG, COPY and ADD of the task's own files."""

    def __init__(self, directory: Path, task: HarborTask) -> None:
        self._directory, self._workdir, self._task = directory, PurePosixPath("/"), task
        self._env: dict[str, str] = {}
        self._args: dict[str, str] = {}
        self._global_args: dict[str, str] = {}
        """Arguments from before FROM, which count where they are declared again."""
        self._in_stage = False
        self._copies: list[tuple[Path, PurePosixPath, str]] = []

    def layout(self) -> WorkspaceLayout:
        for number, line in _instructions(self._directory / "Dockerfile"):
            where = f"{self._directory / 'Dockerfile'}, line {number}"
            word, _, rest = line.partition(" ")
            try:
                self._read(word.upper(), rest.strip(), where)
            except TasksError:
                raise
            except (ValueError, LookupError) as error:  # an open quote, invalid JSON, or missing arguments
                raise TasksError(f"{where}: {line[:80]!r} cannot be read: {error}") from error
        workdir = PurePosixPath(
            self._task.workdir or (self._workdir if self._workdir != PurePosixPath("/") else WORKDIR)
        )
        for _, target, where in self._copies:
            if ".." in target.parts or not target.is_relative_to(workdir):
                raise ImageRequired(f"{where}: {target} is outside the working directory {workdir}, which {_FIX}")
        copies = tuple((source, target.relative_to(workdir)) for source, target, _ in self._copies)
        return WorkspaceLayout(str(workdir), self._env, copies)

    def _read(self, word: str, rest: str, where: str) -> None:
        if word == "FROM":
            if self._in_stage:
                raise ImageRequired(f"{where}: a Dockerfile with several stages {_FIX}")
            words = [word for word in self._words(rest, where) if not word.startswith("--")]
            if self._task.needs_image and words[0] != "scratch":
                raise ImageRequired(f"{where}: the image {words[0]!r} {_FIX}, {_OR_DECLARE}")
            self._in_stage, self._global_args, self._args = True, self._args, {}
        elif word == "WORKDIR":
            self._workdir /= " ".join(self._words(rest, where))
        elif word == "ENV":
            pairs = self._words(rest, where)
            if "=" not in pairs[0]:
                pairs = [f"{pairs[0]}={self._expand(_mark_literals(rest).partition(' ')[2].strip(), where)}"]
            self._env |= dict(pair.split("=", 1) for pair in pairs)
        elif word == "ARG":
            for name, equals, value in (pair.partition("=") for pair in self._words(rest, where)):
                if equals or name in self._global_args:
                    self._args[name] = value if equals else self._global_args[name]
        elif word in ("COPY", "ADD"):
            self._copy(rest, where, unpacks=word == "ADD")
        elif word not in _IRRELEVANT:
            raise ImageRequired(f"{where}: {word} {_FIX}")

    def _words(self, rest: str, where: str) -> list[str]:
        return [self._expand(word, where) for word in shlex.split(_mark_literals(rest))]

    def _expand(self, word: str, where: str) -> str:
        """A word with its variables expanded; PATH is that of this machine, whose programs run."""
        variables = {"PATH": os.environ.get("PATH", os.defpath), **self._args, **self._env}

        def value(match: re.Match[str]) -> str:
            name, default = match[1] or match[2] or "", match[3]
            if name not in variables and default is None:
                variable = match[0] if name else word
                raise ImageRequired(f"{where}: the value of {variable!r} {_FIX}")
            return variables.get(name) or default or ""

        return _VARIABLE.sub(value, word).replace(_LITERAL_DOLLAR, "$")

    def _copy(self, rest: str, where: str, *, unpacks: bool) -> None:
        exact = rest.startswith("[")
        words = [self._expand(word, where) for word in json.loads(rest)] if exact else self._words(rest, where)
        flags = [word for word in words if word.startswith("--")]
        *sources, target = [word for word in words if not word.startswith("--")]
        if any(not flag.startswith(("--chown", "--chmod")) for flag in flags) or not sources:
            raise ImageRequired(f"{where}: copying anything but files beside the Dockerfile {_FIX}")
        for name in sources:
            matches = sorted(self._directory.glob(name)) if any(c in name for c in "*?[") else [self._directory / name]
            for source in matches:
                if not source.exists() or not source.resolve().is_relative_to(self._directory.resolve()):
                    raise TasksError(f"{where}: {name!r} does not exist beside the Dockerfile")
                if unpacks and source.is_file() and (".tar" in source.suffixes or tarfile.is_tarfile(source)):
                    raise ImageRequired(f"{where}: ADD unpacks {name!r}, which {_FIX}")
                into = not source.is_dir() and (target.endswith(("/", ".")) or len(matches) > 1 or len(sources) > 1)
                path = self._workdir / target
                self._copies.append((source, path / source.name if into else path, where))


def _mark_literals(text: str) -> str:
    """The text with a placeholder for each dollar sign that is quoted by `'` or by a backslash."""

    def mark(match: re.Match[str]) -> str:
        part = match[0]
        return part.replace("$", _LITERAL_DOLLAR) if part[0] == "'" else part.replace("\\$", _LITERAL_DOLLAR)

    return _QUOTED.sub(mark, text)


def _instructions(file: Path) -> Iterator[tuple[int, str]]:
    """The instructions with their line numbers, without comments, continued lines joined."""
    instruction, first_line = "", 0
    for number, raw in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        first_line = first_line if instruction else number
        instruction += f" {line.removesuffix(chr(92)).strip()}"
        if not line.endswith("\\"):
            yield first_line, instruction.strip()
            instruction = ""
    if instruction:
        yield first_line, instruction.strip()
