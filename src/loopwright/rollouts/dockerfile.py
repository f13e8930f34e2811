"""What a task's `environment/` puts into the workspace, without Docker: its files, or what its Dockerfile copies."""

import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from loopwright.rollouts.harbor_task import WORKDIR, HarborTask
from loopwright.rollouts.tasks import TasksError

_HARMLESS = frozenset({"FROM", "LABEL", "MAINTAINER", "EXPOSE", "CMD", "ENTRYPOINT", "STOPSIGNAL", "SHELL", "ARG"})
"""Instructions that change nothing about the files and variables that an agent finds."""
_DEFINITIONS = ("docker-compose.yaml", "docker-compose.yml")


@dataclass(frozen=True, slots=True)
class Layout:
    """What there is before an agent begins: where it works, its variables, and what is copied from where to where."""

    workdir: str
    env: dict[str, str]
    copies: tuple[tuple[Path, PurePosixPath], ...]
    """Files and directories of the task, and where in the workspace they go; a directory's content is what goes."""

    def lay_out(self, workspace: Path) -> None:
        """Copy it all into the workspace."""
        for source, place in self.copies:
            target = workspace / place
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)


def layout_of(task: HarborTask) -> Layout:
    """The layout of a task; a TasksError names the line of its Dockerfile that only Docker can do."""
    directory = task.path / "environment"
    for name in _DEFINITIONS:
        if (directory / name).exists():
            raise TasksError(f"{directory / name}: several containers need Harbor itself")
    if (directory / "Dockerfile").is_file():
        return _Reader(directory, task.workdir).layout()
    # Without a Dockerfile Harbor puts these files into the working directory of the task's image.
    copies = ((directory, PurePosixPath()),) if directory.is_dir() else ()
    return Layout(task.workdir or WORKDIR, {}, copies)


class _Reader:
    """Reads what of a Dockerfile can be done by copying: WORKDIR, ENV, COPY and ADD of the task's own files."""

    def __init__(self, directory: Path, workdir: str | None) -> None:
        self._directory, self._at = directory, PurePosixPath("/")
        self._given = workdir
        self._env: dict[str, str] = {}
        self._copies: list[tuple[Path, PurePosixPath, str]] = []

    def layout(self) -> Layout:
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
        return Layout(str(workdir), self._env, tuple(_inside(workdir, *copy) for copy in self._copies))

    def _read(self, word: str, rest: str, where: str) -> None:
        if word == "WORKDIR":
            self._at /= rest
        elif word == "ENV":
            pairs = shlex.split(rest)
            if "=" not in pairs[0]:
                pairs = [f"{pairs[0]}={rest.partition(' ')[2].strip()}"]
            self._env |= dict(pair.split("=", 1) for pair in pairs)
        elif word in ("COPY", "ADD"):
            self._copy(rest, where)
        elif word not in _HARMLESS:
            raise TasksError(
                f"{where}: {word} needs Docker to build an image, which only Harbor does. "
                f"Put what it makes into {self._directory} and take the line out, or have Harbor run the task"
            )

    def _copy(self, rest: str, where: str) -> None:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
        flags = [word for word in words if word.startswith("--")]
        *sources, target = [word for word in words if not word.startswith("--")]
        if any(not flag.startswith(("--chown", "--chmod")) for flag in flags) or not sources:
            raise TasksError(f"{where}: only files beside the Dockerfile can be copied without Docker")
        for name in sources:
            found = sorted(self._directory.glob(name)) if any(c in name for c in "*?[") else [self._directory / name]
            for source in found:
                if not source.exists() or not source.resolve().is_relative_to(self._directory.resolve()):
                    raise TasksError(f"{where}: there is no {name!r} beside the Dockerfile")
                into = not source.is_dir() and (target.endswith(("/", ".")) or len(found) > 1 or len(sources) > 1)
                place = self._at / target
                self._copies.append((source, place / source.name if into else place, where))


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
