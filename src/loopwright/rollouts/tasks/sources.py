"""Sources of tasks: their base, Python functions, and what a scenario lists under `tasks`."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, Field, SerializeAsAny

from loopwright.core.config import FUNCTION, Config
from loopwright.core.errors import LoopwrightError, Problem, sentence
from loopwright.core.imports import import_function
from loopwright.core.registry import Registry, config_parser
from loopwright.core.task import Task
from loopwright.engines.base import Sampling
from loopwright.rollouts.judgers.base import AnyJudger
from loopwright.rollouts.loops.base import AnyLoop
from loopwright.rollouts.produce_config import ProduceConfig


class TasksError(LoopwrightError, ValueError):
    """A source of tasks is empty, unreadable, or has an invalid row, which the message names."""


class TasksConfig(Config, ABC):
    """A source of tasks.

    class Doubling(TasksConfig):
        type: Literal["doubling"] = "doubling"

        def rows(self, scenario_dir: Path) -> Iterable[Mapping[str, Any]]:
            return ({"prompt": f"2*{n}=", "label": 2 * n} for n in range(10))
    """

    brings: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The tables of the `loop` and the `judger` that its tasks need, if they work with no others."""
    type: str
    name: str | None = None
    """Its name in tables, and the `data_source` of tasks that have none; without it, the file's or function's name."""
    weight: float = Field(default=1.0, gt=0)
    """Its share of each batch, relative to the other sources."""
    loop: AnyLoop | None = None
    """How its tasks are attempted; without it, by the run's loop."""
    judger: AnyJudger | None = None
    """How its episodes are judged; without it, by the run's judger, or for held-out tasks by that of `[run.eval]`."""
    produce: ProduceConfig | None = None
    """How its groups are produced; keys that are missing here are as in the run's `produce`."""
    sampling: Sampling | None = None
    """How the policy is sampled; settings that are missing here are the loop's, or for held-out tasks those of
    `[run.eval]`."""

    @abstractmethod
    def rows(self, scenario_dir: Path) -> Iterable[Mapping[str, Any]]:
        """The rows, each with a `prompt` (text or messages) and optionally `label`, `data_source` and `id`."""

    def label(self) -> str:
        """Its name."""
        return self.name or self.type

    def located_rows(self, scenario_dir: Path) -> Iterable[tuple[str, Any]]:
        """The rows, each with its location for error messages."""
        return ((f"row {number}", row) for number, row in enumerate(self.rows(scenario_dir)))

    def unusable(self, scenario_dir: Path) -> Mapping[str, str]:
        """What it leaves out, such as task directories with mistakes: names and reasons."""
        return {}

    def load(self, scenario_dir: Path) -> list[Task]:
        """All tasks, in order; TasksError without any, or if a row is invalid."""
        try:
            rows = list(self.located_rows(scenario_dir))
        except OSError as error:
            raise TasksError(
                f"{error.filename or 'a file'} cannot be read: {error.strerror or error}; "
                "is its path relative to the scenario?"
            ) from error
        except (LoopwrightError, ImportError) as error:
            raise TasksError(str(error)) from error
        except Exception as error:  # user code may raise anything
            raise TasksError(f"{type(error).__name__}: {error}") from error
        tasks = [self._parse(number, location, row) for number, (location, row) in enumerate(rows)]
        if not tasks:
            raise TasksError("it has no tasks")
        return tasks

    def _parse(self, number: int, location: str, row: Any) -> Task:
        if not isinstance(row, Mapping):
            raise TasksError(f"{location} is {type(row).__name__}, not a table")
        try:
            task = Task.of(row, id=f"{self.label()}/{number}", data_source=self.label())
            # As the ledger will read it, so that a resumed run judges by the same label.
            return Task.from_json(orjson.loads(orjson.dumps(task.as_json())))
        except (TypeError, ValueError) as error:
            raise TasksError(f"{location}: {error}") from error

    def problems(self, scenario_dir: Path) -> list[Problem]:
        """What is wrong with this source; checked before anything starts."""
        try:
            self.load(scenario_dir)
        except LoopwrightError as error:
            return [Problem(self.label(), sentence(error))]
        return []


class PythonTasks(TasksConfig):
    """A Python function that returns the rows."""

    type: Literal["python"] = "python"
    function: str = Field(pattern=FUNCTION)
    """`module:function`, imported from the scenario's directory first."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""

    def label(self) -> str:
        return self.name or self.function.partition(":")[2]

    def rows(self, scenario_dir: Path) -> Iterable[Mapping[str, Any]]:
        function = import_function(self.function, scenario_dir)
        try:
            return list(function(**self.args))
        except Exception as error:
            raise TasksError(f"{self.function} failed: {type(error).__name__}: {error}") from error


task_sources: Registry[type[TasksConfig]] = Registry("task source", "loopwright.tasks", TasksConfig)
for _name, _class in {
    "jsonl": "files:JsonlTasks",
    "parquet": "files:ParquetTasks",
    "datasets": "files:DatasetsTasks",
    "python": "sources:PythonTasks",
    "harbor": "harbor.source:HarborTasks",
    "verifiers": "verifiers:VerifiersTasks",
    "inspect": "inspect:InspectTasks",
}.items():
    task_sources.add_lazily(_name, f"loopwright.rollouts.tasks.{_class}")

_parse_source = config_parser(task_sources)


def _as_list(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return (_parse_source(value),)
    if not value:
        raise ValueError("is empty; name at least one source of tasks")
    return value


Sources = Annotated[
    tuple[Annotated[SerializeAsAny[TasksConfig], BeforeValidator(_parse_source)], ...], BeforeValidator(_as_list)
]
"""A config field for one source of tasks or a list of them."""


def source_problems(sources: Sequence[TasksConfig], scenario_dir: Path) -> list[Problem]:
    """What is wrong with these sources; checked before anything starts."""
    problems = [Problem(f"tasks, {p.key}", p.message) for source in sources for p in source.problems(scenario_dir)]
    names = Counter(source.label() for source in sources)
    duplicates = [name for name, count in names.items() if count > 1]
    return problems + [
        Problem("tasks", f"two sources are called {name!r}; give each its own `name`.") for name in duplicates
    ]


def select_tasks(
    source: TasksConfig, scenario_dir: Path, refusal: Callable[[Task], str]
) -> tuple[list[Task], dict[str, str]]:
    """The tasks of a source that can be attempted; and the others, by their names, with the reasons."""
    tasks = source.load(scenario_dir)
    refusals = {task.id: reason for task in tasks if (reason := refusal(task))}
    return [task for task in tasks if task.id not in refusals], {**source.unusable(scenario_dir), **refusals}


def shared_tasks(sources: Sequence[TasksConfig], held_out: Sequence[TasksConfig], scenario_dir: Path) -> list[Task]:
    """The tasks of the held-out sources that are trained on as well."""
    training = {_content(task) for source in sources for task in source.load(scenario_dir)}
    return [task for source in held_out for task in source.load(scenario_dir) if _content(task) in training]


_LOCATION_KEYS = ("index", "split", "instance_id", "local_task_path")
"""Keys of `extra_info` that locate a task in its dataset."""


def _content(task: Task) -> bytes:
    """What two equal tasks have in common, whatever their ids and locations."""
    extra = dict(task.extra)
    if isinstance(info := extra.get("extra_info"), Mapping):
        extra["extra_info"] = {name: value for name, value in info.items() if name not in _LOCATION_KEYS}
    content = extra.get("task_hash") or [task.messages, task.label, extra]
    return orjson.dumps(content, option=orjson.OPT_SORT_KEYS)
