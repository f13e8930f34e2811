"""Where tasks come from, and in which order: sources share each batch by weight, each in seeded epochs of its own."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from math import lcm
from pathlib import Path
from random import Random
from typing import Any, Literal

import orjson
from pydantic import Field

from loopwright.core.config import Config
from loopwright.core.errors import LoopwrightError, Problem, sentence
from loopwright.core.imports import import_function
from loopwright.core.lazy import lazy_module
from loopwright.core.registry import Registry
from loopwright.core.task import Task


class TasksError(LoopwrightError, ValueError):
    """A source gave no tasks, or something that is no task; says which row."""


class TasksConfig(Config, ABC):
    """A source of tasks.

    class Doubling(TasksConfig):
        type: Literal["doubling"] = "doubling"

        def rows(self, home: Path) -> Iterable[Mapping[str, Any]]:
            return ({"prompt": f"2*{n}=", "label": 2 * n} for n in range(10))
    """

    type: str
    name: str | None = None
    """Its name in tables, and the `data_source` of tasks that have none; without it, the file's or function's name."""
    weight: float = Field(default=1.0, gt=0)
    """Its share of each batch, relative to the other sources."""

    @abstractmethod
    def rows(self, home: Path) -> Iterable[Mapping[str, Any]]:
        """The rows: `prompt` (text or messages), and `label`, `data_source`, `id` where there are any."""

    def label(self) -> str:
        """Its name."""
        return self.name or self.type

    def load(self, home: Path) -> list[Task]:
        """All tasks, in order; a TasksError says what is wrong."""
        try:
            rows = list(self.placed(home))
        except OSError as error:
            what = error.filename or "it"
            raise TasksError(
                f"{what} cannot be read: {error.strerror or error}; is its path relative to the scenario?"
            ) from error
        except (LoopwrightError, ImportError) as error:
            raise TasksError(str(error)) from error
        except Exception as error:  # user code may raise anything
            raise TasksError(f"{type(error).__name__}: {error}") from error
        tasks = [self._task(number, place, row) for number, (place, row) in enumerate(rows)]
        if not tasks:
            raise TasksError("there is no task in it")
        return tasks

    def placed(self, home: Path) -> Iterable[tuple[str, Any]]:
        """The rows, each with what it is called in a complaint."""
        return ((f"row {number}", row) for number, row in enumerate(self.rows(home)))

    def _task(self, number: int, place: str, row: Any) -> Task:
        if not isinstance(row, Mapping):
            raise TasksError(f"{place} is no table but {type(row).__name__}")
        try:
            task = Task.of(row, id=f"{self.label()}/{number}", data_source=self.label())
            # As it will be read from the ledger, so that a resumed run judges by the same label.
            return Task.from_json(orjson.loads(orjson.dumps(task.as_json())))
        except (TypeError, ValueError) as error:
            raise TasksError(f"{place}: {error}") from error

    def problems(self, home: Path) -> list[Problem]:
        """What is wrong with it; found before anything starts."""
        try:
            self.load(home)
        except LoopwrightError as error:
            return [Problem(self.label(), sentence(error))]
        return []


class JsonlTasks(TasksConfig):
    """A file with one JSON object per line."""

    type: Literal["jsonl"] = "jsonl"
    path: str
    """The file, relative to the scenario."""

    def label(self) -> str:
        return self.name or Path(self.path).stem

    def rows(self, home: Path) -> Iterable[Mapping[str, Any]]:
        return (row for _, row in self.placed(home))

    def placed(self, home: Path) -> Iterable[tuple[str, Any]]:
        with (home / self.path).open("rb") as lines:
            for number, line in enumerate(lines, 1):
                place = f"{self.path}, line {number}"
                if line.strip():
                    try:
                        yield place, orjson.loads(line)
                    except orjson.JSONDecodeError as error:
                        raise TasksError(f"{place}: {error}") from error


class ParquetTasks(TasksConfig):
    """A Parquet file with a row per task."""

    type: Literal["parquet"] = "parquet"
    path: str
    """The file, relative to the scenario."""

    def label(self) -> str:
        return self.name or Path(self.path).stem

    def rows(self, home: Path) -> Iterable[Mapping[str, Any]]:
        try:
            parquet = lazy_module("pyarrow.parquet")
        except ModuleNotFoundError as error:
            raise TasksError("reading Parquet needs: pip install 'loopwright[parquet]'") from error
        return parquet.read_table(home / self.path).to_pylist()  # type: ignore[no-any-return]


class PythonTasks(TasksConfig):
    """A Python function that gives the rows."""

    type: Literal["python"] = "python"
    function: str = Field(pattern=r"^[\w.]+:[\w.]+$")
    """`module:function`, imported from the scenario's directory first."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""

    def label(self) -> str:
        return self.name or self.function.partition(":")[2]

    def rows(self, home: Path) -> Iterable[Mapping[str, Any]]:
        function = import_function(self.function, home)
        try:
            return list(function(**self.args))
        except Exception as error:
            raise TasksError(f"{self.function} failed: {type(error).__name__}: {error}") from error


task_sources: Registry[type[TasksConfig]] = Registry("task source", "loopwright.tasks", TasksConfig)
for _source in (JsonlTasks, ParquetTasks, PythonTasks):
    task_sources.add(_source.model_fields["type"].default, _source)
task_sources.add_lazily("harbor", "loopwright.rollouts.tasks.harbor.source:HarborTasks")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task and where it stands: what a rollout's action refers to."""

    source: str
    index: int
    task: Task

    @property
    def action(self) -> Mapping[str, Any]:
        """What the ledger records."""
        return {"source": self.source, "index": self.index, "task": self.task.id}


class TaskMix:
    """Draws prompts from several sources so that at any moment each has had its share, to within one.

    Which prompt comes next depends on the seed and on how many were drawn from each source, and on nothing else.
    """

    def __init__(
        self,
        sources: Mapping[str, Sequence[Task]],
        weights: Mapping[str, float],
        seed: int,
        held_out: Mapping[str, Sequence[Task]] | None = None,
    ) -> None:
        exact = {name: Fraction(str(weights[name])) for name in sources}
        whole = lcm(*(weight.denominator for weight in exact.values()))
        self._sources, self._seed, self._held_out = sources, seed, held_out or {}
        self._weights = {name: int(weight * whole) for name, weight in exact.items()}
        self._total = sum(self._weights.values())
        self._drawn = dict.fromkeys(sources, 0)
        self._orders: dict[str, tuple[int, list[int]]] = {}

    @classmethod
    def load(
        cls, configs: Sequence[TasksConfig], seed: int, home: Path, held_out: Sequence[TasksConfig] = ()
    ) -> "TaskMix":
        """The mix of these sources; those that are held out are never drawn."""
        held = {f"eval:{c.label()}": c.load(home) for c in held_out}
        return cls({c.label(): c.load(home) for c in configs}, {c.label(): c.weight for c in configs}, seed, held)

    def restore(self, drawn: Mapping[str, int]) -> None:
        """Go on after this many draws from each source."""
        self._drawn.update({name: count for name, count in drawn.items() if name in self._drawn})

    def draw(self) -> Prompt:
        """The next prompt."""
        name = self._next_source()
        count, tasks = self._drawn[name], self._sources[name]
        self._drawn[name] += 1
        epoch, place = divmod(count, len(tasks))
        known, order = self._orders.get(name, (-1, []))
        if known != epoch:
            order = list(range(len(tasks)))
            Random(f"{self._seed}:{name}:{epoch}").shuffle(order)
            self._orders[name] = epoch, order
        return Prompt(name, order[place], tasks[order[place]])

    def _next_source(self) -> str:
        """Of the sources whose share allows one more by now, that which must have it the soonest.

        Earliest deadline first keeps all within one of their shares; to take the one that is furthest behind does not.
        """
        now, total = sum(self._drawn.values()), self._total
        allowed = [n for n, weight in self._weights.items() if self._drawn[n] * total // weight <= now]
        return min(allowed, key=lambda n: -(-(self._drawn[n] + 1) * total // self._weights[n]))

    def find(self, action: Mapping[str, Any]) -> Prompt:
        """The prompt that a recorded action refers to."""
        name, index = action["source"], action["index"]
        tasks = self._held_out[name] if name in self._held_out else self._sources[name]
        if not 0 <= index < len(tasks):
            raise IndexError(f"{name} has {len(tasks)} tasks, and none is number {index}")
        return Prompt(name, index, tasks[index])

    def prompts(self) -> list[Prompt]:
        """All that can be drawn."""
        return _prompts(self._sources)

    def held_out(self) -> list[Prompt]:
        """The prompts that are for evaluation alone."""
        return _prompts(self._held_out)

    def fingerprint(self) -> str:
        """Changes with any task."""
        digest = blake2b(digest_size=16)
        for name, tasks in [*self._sources.items(), *self._held_out.items()]:
            digest.update(orjson.dumps((name, len(tasks))))
            for task in tasks:
                digest.update(orjson.dumps(task.as_json()))
        return digest.hexdigest()


def _prompts(sources: Mapping[str, Sequence[Task]]) -> list[Prompt]:
    return [Prompt(name, index, task) for name, tasks in sources.items() for index, task in enumerate(tasks)]
