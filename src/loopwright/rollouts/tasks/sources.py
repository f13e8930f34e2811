"""What `tasks` holds, for training and for evaluation: one source of tasks, or several."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import BeforeValidator, SerializeAsAny

from loopwright.core.errors import Problem
from loopwright.core.tagged_config import config_parser
from loopwright.core.task import Task
from loopwright.rollouts.tasks.base import TasksConfig, task_sources

_source = config_parser(task_sources)
_WHERE = ("index", "split", "instance_id", "local_task_path")
"""What `extra_info` has of a task's place in its dataset."""


def _listed(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return (_source(value),)
    if not value:
        raise ValueError("is empty; name at least one source of tasks")
    return value


Sources = Annotated[
    tuple[Annotated[SerializeAsAny[TasksConfig], BeforeValidator(_source)], ...], BeforeValidator(_listed)
]


def source_problems(sources: Sequence[TasksConfig], home: Path) -> list[Problem]:
    """What is wrong with these sources; found before anything starts."""
    found = [Problem(f"tasks, {p.key}", p.message) for source in sources for p in source.problems(home)]
    names = Counter(source.label() for source in sources)
    twice = [name for name, count in names.items() if count > 1]
    return found + [Problem("tasks", f"two sources are called {name!r}; give each its own `name`.") for name in twice]


def in_both(sources: Sequence[TasksConfig], held_out: Sequence[TasksConfig], home: Path) -> list[Task]:
    """The tasks that are held out, but trained on as well."""
    trained = {_content(task) for source in sources for task in source.load(home)}
    return [task for source in held_out for task in source.load(home) if _content(task) in trained]


def _content(task: Task) -> bytes:
    """What makes it the task that it is, wherever it was found and whatever it is called there."""
    extra = dict(task.extra)
    if isinstance(about := extra.get("extra_info"), Mapping):
        extra["extra_info"] = {name: value for name, value in about.items() if name not in _WHERE}
    content = extra.get("task_hash") or [task.messages, task.label, extra]
    return orjson.dumps(content, option=orjson.OPT_SORT_KEYS)
