"""What a task's `environment/` puts into the workspace, without Docker: its files, or what its Dockerfile copies."""

import json
import os
import re
import shlex
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from loopwright.rollouts.tasks.base import TasksError
from loopwright.rollouts.tasks.harbor.task import PASSED_OVER, WORKDIR, HarborTask

_HARMLESS = frozenset({"LABEL", "MAINTAINER", "EXPOSE", "CMD", "ENTRYPOINT", "STOPSIGNAL", "SHELL"})
"""Instructions that change nothing about the files and variables that an agent finds."""
_QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\"""")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^${}]*))?\})?")
_PLAIN = "\0"
"""Stands for a dollar sign that begins no variable."""
_DEFINITIONS = ("docker-compose.yaml", "docker-compose.yml")


@dataclass(frozen=True, slots=True)
class WorkspaceLayout:
    """What there is before an agent begins: where it works, its variables, and what is copied from where to where."""

    workdir: str
    env: dict[str, str]
    copies: tuple[tuple[Path, PurePosixPath], ...]
    """Files and directories of the task, and where in the workspace they go; a directory's content is what goes."""

    def copy_into(self, workspace: Path) -> None:
        """Copy it all into the workspace."""
        for source, place in self.copies:
            target = workspace / place
            if source.is_dir():
                over = shutil.ignore_patterns(*PASSED_OVER)
                shutil.copytree(source, target, symlinks=True, ignore=over, dirs_exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)


def read_layout(task: HarborTask) -> WorkspaceLayout:
    """The layout of a task; a TasksError names the line of its Dockerfile that only Docker can do."""
    directory = task.path / "environment"
    for name in _DEFINITIONS:
        if (directory / name).exists():
            raise TasksError(f"{directory / name}: several containers need Harbor itself")
    if (directory / "Dockerfile").is_file():
        return _Reader(directory, task.workdir).layout()
    # Without a Dockerfile Harbor puts these files into the working directory of the task's image.
    copies = ((directory, PurePosixPath()),) if directory.is_dir() else ()
    return WorkspaceLayout(task.workdir or WORKDIR, {}, copies)


class _Reader:
    """Reads what of a Dockerfile can be done by copying: WORKDIR, ENV, ARG, COPY and ADD of the task's own files."""

    def __init__(self, directory: Path, workdir: str | None) -> None:
        self._directory, self._at = directory, PurePosixPath("/")
        self._given = workdir
        self._env: dict[str, str] = {}
        self._args: dict[str, str] = {}
        self._before: dict[str, str] = {}
        """Arguments from before FROM, which count where they are declared again."""
        self._begun = False
        self._copies: list[tuple[Path, PurePosixPath, str]] = []

    def layout(self) -> WorkspaceLayout:
        for number, line in _lines(self._directory / "Dockerfile"):
            where = f"{self._directory / 'Dockerfile'}, line {number}"
            word, _, rest = line.partition(" ")
            try:
                self._read(word.upper(), rest.strip(), where)
            except TasksError:
                raise
            except (ValueError, LookupError) as error:  # an open quote, no JSON, or nothing where there must be words
                raise TasksError(f"{where}: {line[:80]!r} cannot be read: {error}") from error
        workdir = PurePosixPath(self._given or (self._at if self._at != PurePosixPath("/") else WORKDIR))
        return WorkspaceLayout(str(workdir), self._env, tuple(_inside(workdir, *copy) for copy in self._copies))

    def _read(self, word: str, rest: str, where: str) -> None:
        if word == "FROM":
            if self._begun:
                raise TasksError(f"{where}: a Dockerfile with several stages needs Docker, which only Harbor has")
            self._begun, self._before, self._args = True, self._args, {}
        elif word == "WORKDIR":
            self._at /= " ".join(self._words(rest, where))
        elif word == "ENV":
            pairs = self._words(rest, where)
            if "=" not in pairs[0]:
                pairs = [f"{pairs[0]}={self._filled(_marked(rest).partition(' ')[2].strip(), where)}"]
            self._env |= dict(pair.split("=", 1) for pair in pairs)
        elif word == "ARG":
            for name, given, value in (pair.partition("=") for pair in self._words(rest, where)):
                if given or name in self._before:
                    self._args[name] = value if given else self._before[name]
        elif word in ("COPY", "ADD"):
            self._copy(rest, where, unpacks=word == "ADD")
        elif word not in _HARMLESS:
            raise TasksError(
                f"{where}: {word} needs Docker to build an image, which only Harbor does. "
                f"Put what it makes into {self._directory} and take the line out, or have Harbor run the task"
            )

    def _words(self, rest: str, where: str) -> list[str]:
        return [self._filled(word, where) for word in shlex.split(_marked(rest))]

    def _filled(self, word: str, where: str) -> str:
        """A word with its variables filled in; PATH is this machine's, as its programs are."""
        known = {"PATH": os.environ.get("PATH", os.defpath), **self._args, **self._env}

        def value(found: re.Match[str]) -> str:
            name = found[1] or found[2] or ""
            if name not in known and found[3] is None:
                said = f"{(found[0] if name else word)!r} is not known without the image"
                raise TasksError(f"{where}: {said}, which only Docker has. Write what it stands for")
            return known.get(name) or found[3] or ""

        return _VARIABLE.sub(value, word).replace(_PLAIN, "$")

    def _copy(self, rest: str, where: str, *, unpacks: bool) -> None:
        exact = rest.startswith("[")
        words = [self._filled(word, where) for word in json.loads(rest)] if exact else self._words(rest, where)
        flags = [word for word in words if word.startswith("--")]
        *sources, target = [word for word in words if not word.startswith("--")]
        if any(not flag.startswith(("--chown", "--chmod")) for flag in flags) or not sources:
            raise TasksError(f"{where}: only files beside the Dockerfile can be copied without Docker")
        for name in sources:
            found = sorted(self._directory.glob(name)) if any(c in name for c in "*?[") else [self._directory / name]
            for source in found:
                if not source.exists() or not source.resolve().is_relative_to(self._directory.resolve()):
                    raise TasksError(f"{where}: there is no {name!r} beside the Dockerfile")
                if unpacks and source.is_file() and (".tar" in source.suffixes or tarfile.is_tarfile(source)):
                    raise TasksError(f"{where}: ADD unpacks {name!r}, which needs Docker. Unpack it and use COPY")
                into = not source.is_dir() and (target.endswith(("/", ".")) or len(found) > 1 or len(sources) > 1)
                place = self._at / target
                self._copies.append((source, place / source.name if into else place, where))


def _marked(text: str) -> str:
    """The text with a mark for each dollar sign that is quoted by `'` or by a backslash."""

    def mark(quoted: re.Match[str]) -> str:
        part = quoted[0]
        return part.replace("$", _PLAIN) if part[0] == "'" else part.replace("\\$", _PLAIN)

    return _QUOTED.sub(mark, text)


def _inside(workdir: PurePosixPath, source: Path, place: PurePosixPath, where: str) -> tuple[Path, PurePosixPath]:
    if ".." in place.parts or not place.is_relative_to(workdir):
        raise TasksError(f"{where}: {place} lies outside of the working directory {workdir}, which needs Docker")
    return source, place.relative_to(workdir)


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """The instructions, each with the number of its first line; comments are left out, continued lines joined."""
    held, begun = "", 0
    for number, raw in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        begun = begun if held else number
        held += f" {line.removesuffix(chr(92)).strip()}"
        if not line.endswith("\\"):
            yield begun, held.strip()
            held = ""
    if held:
        yield begun, held.strip()
