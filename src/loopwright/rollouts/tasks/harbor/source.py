"""Harbor tasks as a source: directories become rows with the columns that verl reads, cached as Parquet."""

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loopwright.core.errors import Problem, sentence
from loopwright.core.task import Task
from loopwright.rollouts.tasks.harbor.cache import cached_rows
from loopwright.rollouts.tasks.harbor.dockerfile import read_layout
from loopwright.rollouts.tasks.harbor.task import TOML, HarborTask, ImageRequired, TaskChanged
from loopwright.rollouts.tasks.sources import TasksConfig, TasksError

_VALIDATION = frozenset({"validation", "valid", "val", "eval", "test"})
_MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class TaskDirectory:
    """A task directory below a root: its id, and the task or what is wrong with it."""

    id: str
    path: Path
    task: HarborTask | None
    problem: str = ""
    needs_docker: str = ""
    """Why it can only be attempted with `sandbox = "docker"`."""


def scan(root: Path) -> Iterator[TaskDirectory]:
    """All task directories below a root, which may be a task itself, in the order of their names."""
    if not root.is_dir():
        raise TasksError(f"directory {root} does not exist; is its path relative to the scenario?")
    root = root.resolve()
    for path in _directories(root):
        name = path.name if path == root else path.relative_to(root).as_posix()
        try:
            task = HarborTask.read(path)
        except TasksError as error:
            yield TaskDirectory(name, path, None, str(error))
            continue
        try:
            read_layout(task)
        except ImageRequired as error:
            yield TaskDirectory(name, path, task, needs_docker=str(error))
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


def dataset_row(entry: TaskDirectory, task: HarborTask, index: int, data_source: str, split: str) -> dict[str, Any]:
    """One row of the dataset, with the columns that Loopwright reads and those that verl reads."""
    first = task.steps[0]
    difficulty = task.metadata.get("difficulty")
    return {
        "id": entry.id,
        "instance_id": entry.id,
        "local_task_path": str(entry.path),
        "task_hash": task.digest,
        "tested": task.has_tests,
        "needs_docker": entry.needs_docker or None,
        "difficulty": None if difficulty is None else str(difficulty),
        "data_source": data_source,
        "prompt": [{"role": "user", "content": first.instruction}],
        "ability": str(task.metadata.get("category", "agent")),
        "reward_model": {"style": "harbor", "ground_truth": ""},
        "extra_info": {
            "index": index,
            "split": split,
            "instance_id": entry.id,
            "local_task_path": str(entry.path),
        },
    }


def default_split(root: Path) -> str:
    """`validation` for a directory called eval, val, validation or test; otherwise `train`."""
    return "validation" if root.resolve().name.lower() in _VALIDATION else "train"


class HarborTasks(TasksConfig):
    """A directory of Harbor tasks, each with `task.toml`, `instruction.md` and whatever else it needs."""

    type: Literal["harbor"] = "harbor"
    path: str
    """The directory, relative to the scenario; tasks can be at any depth below it."""
    split: str | None = None
    """The `split` column of the rows; without it `validation` for a directory called eval, val, validation or test,
    and otherwise `train`."""

    def label(self) -> str:
        return self.name or Path(self.path).name or self.type

    def rows(self, scenario_dir: Path) -> Iterable[Mapping[str, Any]]:
        rows = [row for row in self._all_rows(scenario_dir) if row["problem"] is None]
        optional = ("needs_docker", "problem")
        return [{key: row[key] for key in row if key not in optional or row[key] is not None} for row in rows]

    def unusable(self, scenario_dir: Path) -> Mapping[str, str]:
        return {row["id"]: row["problem"] for row in self._all_rows(scenario_dir) if row["problem"] is not None}

    def located_rows(self, scenario_dir: Path) -> Iterable[tuple[str, Any]]:
        return ((str(row["local_task_path"]), row) for row in self.rows(scenario_dir))

    def _all_rows(self, scenario_dir: Path) -> list[dict[str, Any]]:
        """The rows of all directories; those of unusable ones say only where they are and why."""
        root = scenario_dir / self.path
        split = self.split or default_split(root)
        return cached_rows(root, f"{self.label()}/{split}", lambda: self._scan(root, split))

    def _scan(self, root: Path, split: str) -> list[dict[str, Any]]:
        entries = list(scan(root))
        if not entries:
            raise TasksError(f"{root} contains no task: a task is a directory with {TOML} and instruction.md")
        tasks = [(entry, entry.task) for entry in entries if entry.task is not None]
        problems = [entry.problem for entry in entries if entry.task is None]
        if not tasks:
            more = f"\nand {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
            raise TasksError("\n".join(problems[:_MAX_PROBLEMS]) + more)
        rows = [dataset_row(entry, task, n, self.label(), split) for n, (entry, task) in enumerate(tasks)]
        bad = [entry for entry in entries if entry.task is None]
        nothing = dict.fromkeys(rows[0])
        return [
            *({**row, "problem": None} for row in rows),
            *({**nothing, "id": each.id, "local_task_path": str(each.path), "problem": each.problem} for each in bad),
        ]

    def problems(self, scenario_dir: Path) -> list[Problem]:
        try:
            self.load(scenario_dir)
        except TasksError as error:
            return [Problem(self.label(), sentence(TasksError(line))) for line in str(error).splitlines()]
        return []


@dataclass(frozen=True, slots=True)
class TaskLocator:
    """Finds the directory of a task: by the row's own path, by root and instance id, or by a template.

    A dataset that was made on another machine needs a root or a template.
    """

    scenario_dir: Path
    root: str | None = None
    template: str | None = None

    def names_directory(self, task: Task) -> bool:
        """Whether a task may have a directory."""
        return bool(task.extra.get("local_task_path") or task.extra.get("instance_id"))

    def find(self, task: Task) -> Path | None:
        """The directory of a task; None if it names none; TasksError if it does not exist."""
        candidates = list(self._candidates(task))
        for path in candidates:
            if (path / TOML).is_file():
                return path
        if candidates:
            raise TasksError(f"task {task.id}: no {TOML} in {' or '.join(map(str, candidates))}")
        return None

    def _candidates(self, task: Task) -> Iterator[Path]:
        if path := task.extra.get("local_task_path"):
            yield self.scenario_dir / str(path)
        if name := str(task.extra.get("instance_id") or ""):
            if (self.root or self.template) and (name.startswith("/") or ".." in name.split("/")):
                raise TasksError(f"instance_id {name!r} would leave the directory of the tasks")
            if self.root:
                yield self.scenario_dir / self.root / name
            if self.template:
                yield self.scenario_dir / self.template.replace("{instance_id}", name)

    def read(self, task: Task) -> HarborTask | None:
        """The task's directory as it is now; TaskChanged if it differs from when the tasks were loaded."""
        path = self.find(task)
        if path is None:
            return None
        harbor_task = HarborTask.read(path)
        expected = task.extra.get("task_hash")
        if expected and expected != harbor_task.digest:
            raise TaskChanged(
                f"{path} has changed since its tasks were loaded, so its rollouts cannot be compared with earlier "
                "ones. Restore it; or scan it again, and start a new run"
            )
        return harbor_task
