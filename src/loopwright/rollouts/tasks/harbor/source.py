"""Harbor tasks as a source: directories in, rows out, in the columns that verl reads; kept as Parquet in between."""

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loopwright.core.errors import Problem, sentence
from loopwright.core.task import Task
from loopwright.rollouts.tasks.base import TasksConfig, TasksError
from loopwright.rollouts.tasks.harbor.cache import kept
from loopwright.rollouts.tasks.harbor.dockerfile import read_layout
from loopwright.rollouts.tasks.harbor.task import TOML, HarborTask, TaskChanged

_VALIDATION = frozenset({"validation", "valid", "val", "eval", "test"})
_MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class TaskDirectory:
    """A task directory below a root: what it is called there, and the task or what is wrong with it."""

    id: str
    path: Path
    task: HarborTask | None
    problem: str = ""


def scan(root: Path) -> Iterator[TaskDirectory]:
    """All task directories below a root, which may be one itself; in the order of their names."""
    if not root.is_dir():
        raise TasksError(f"there is no directory {root}; is its path relative to the scenario?")
    for path in _directories(root.resolve()):
        name = path.relative_to(root.resolve()).as_posix()
        name = path.name if name == "." else name
        try:
            task = HarborTask.read(path)
            read_layout(task)
        except TasksError as error:
            yield TaskDirectory(name, path, None, str(error))
        else:
            yield TaskDirectory(name, path, task)


def _directories(path: Path) -> Iterator[Path]:
    if (path / TOML).exists():
        yield path
        return
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if not entry.name.startswith(".") and stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode):
            yield from _directories(Path(entry.path))


def row_of(found: TaskDirectory, task: HarborTask, index: int, data_source: str, split: str) -> dict[str, Any]:
    """One row of the dataset: what Loopwright reads on top, what verl reads beside it."""
    first = task.steps[0]
    difficulty = task.metadata.get("difficulty")
    return {
        "id": found.id,
        "instance_id": found.id,
        "local_task_path": str(found.path),
        "task_hash": task.digest,
        "tested": task.tested,
        "difficulty": None if difficulty is None else str(difficulty),
        "data_source": data_source,
        "prompt": [{"role": "user", "content": first.instruction}],
        "ability": str(task.metadata.get("category", "agent")),
        "reward_model": {"style": "harbor", "ground_truth": ""},
        "extra_info": {
            "index": index,
            "split": split,
            "instance_id": found.id,
            "local_task_path": str(found.path),
        },
    }


def split_of(root: Path) -> str:
    """`validation` for a directory that is called eval, val, validation or test; otherwise `train`."""
    return "validation" if root.resolve().name.lower() in _VALIDATION else "train"


class HarborTasks(TasksConfig):
    """A directory of Harbor tasks: each has `task.toml` and `instruction.md`, and what else it needs."""

    type: Literal["harbor"] = "harbor"
    path: str
    """The directory, relative to the scenario; tasks are found at any depth below it."""
    split: str | None = None
    """What the rows say of themselves; without it `validation` for a directory called eval, val, validation or test,
    and otherwise `train`."""

    def label(self) -> str:
        return self.name or Path(self.path).name or self.type

    def rows(self, home: Path) -> Iterable[Mapping[str, Any]]:
        root = home / self.path
        return kept(root, f"{self.label()}/{self._split(root)}", lambda: self._scanned(root))

    def placed(self, home: Path) -> Iterable[tuple[str, Any]]:
        return ((str(row["local_task_path"]), row) for row in self.rows(home))

    def _split(self, root: Path) -> str:
        return self.split or split_of(root)

    def _scanned(self, root: Path) -> list[dict[str, Any]]:
        found = list(scan(root))
        if bad := [each.problem for each in found if each.task is None]:
            more = f"\nand {len(bad) - _MOST_PROBLEMS} more" if len(bad) > _MOST_PROBLEMS else ""
            raise TasksError("\n".join(bad[:_MOST_PROBLEMS]) + more)
        if not found:
            raise TasksError(f"there is no task in {root}: a task is a directory with {TOML} and instruction.md")
        tasks = ((each, each.task) for each in found if each.task is not None)
        return [row_of(each, task, n, self.label(), self._split(root)) for n, (each, task) in enumerate(tasks)]

    def problems(self, home: Path) -> list[Problem]:
        try:
            self.load(home)
        except TasksError as error:
            return [Problem(self.label(), sentence(TasksError(line))) for line in str(error).splitlines()]
        return []


@dataclass(frozen=True, slots=True)
class TaskLocator:
    """Where the directories of tasks are looked for: the row's own path, root and instance id, a template.

    A dataset that was made on another machine needs a root or a template.
    """

    home: Path
    root: str | None = None
    template: str | None = None

    def find(self, task: Task) -> Path | None:
        """The directory of a task; None if it has none; TasksError if it is in none of its places."""
        tried = list(self._candidates(task))
        for path in tried:
            if (path / TOML).is_file():
                return path
        if tried:
            raise TasksError(f"task {task.id}: there is no {TOML} in {', nor in '.join(map(str, tried))}")
        return None

    def _candidates(self, task: Task) -> Iterator[Path]:
        given = task.extra.get("local_task_path")
        if given:
            yield self.home / str(given)
        name = task.extra.get("instance_id")
        if name and self.root:
            yield self.home / self.root / _harmless(str(name))
        if name and self.template:
            yield self.home / self.template.replace("{instance_id}", _harmless(str(name)))

    def read(self, task: Task) -> HarborTask | None:
        """The task's directory as it is now; TaskChanged if that is not what it was when the tasks were loaded."""
        path = self.find(task)
        if path is None:
            return None
        found = HarborTask.read(path)
        known = task.extra.get("task_hash")
        if known and known != found.digest:
            raise TaskChanged(
                f"{path} has changed since its tasks were loaded: it is no longer the task that other rollouts had. "
                "Restore it; or scan it again, and start a run of its own"
            )
        return found


def _harmless(name: str) -> str:
    """An instance id that stays below its root, whoever wrote the dataset."""
    if name.startswith("/") or ".." in name.split("/"):
        raise TasksError(f"instance_id {name!r} would leave the directory of the tasks")
    return name
