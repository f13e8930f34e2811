"""Sources of tasks that are files: JSON Lines, Parquet, and folders of Hugging Face `datasets`."""

from abc import ABC
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import orjson
from pydantic import Field

from loopwright.core.errors import did_you_mean
from loopwright.rollouts.tasks.sources import TasksConfig, TasksError

TaskField = Literal["prompt", "messages", "label", "data_source", "id"]
"""What a column can be."""


class FileTasks(TasksConfig, ABC):
    """A source that is a file or a folder, with a row per task."""

    path: str
    """The file, relative to the scenario."""
    columns: dict[TaskField, str] = Field(default_factory=dict, examples=['{ prompt = "question", label = "answer" }'])
    """The columns that hold `prompt` (or `messages`), `label`, `data_source` and `id`, if they have other names. A dot
    leads into a table: `label = "reward_model.ground_truth"`."""

    def label(self) -> str:
        return self.name or Path(self.path).stem

    def located_rows(self, scenario_dir: Path) -> Iterator[tuple[str, Any]]:
        for location, row in self.located_columns(scenario_dir):
            yield location, self._renamed(location, row) if isinstance(row, Mapping) else row

    def located_columns(self, scenario_dir: Path) -> Iterable[tuple[str, Any]]:
        """The rows as they are in the file, each with its location."""
        return super().located_rows(scenario_dir)

    def _renamed(self, location: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row whose columns have our names; a column that had such a name before is hidden."""
        names = ", ".join(row)
        if not self.columns:
            if row and "prompt" not in row and "messages" not in row:
                raise TasksError(
                    f"{location} has neither `prompt` nor `messages`. Its columns are {names}: "
                    'name the one to use, as in columns = { prompt = "question" }'
                )
            return row
        values: dict[str, Any] = {
            field: self._value(location, row, field, column) for field, column in self.columns.items()
        }
        # A prompt can come under two names: the one that is asked for must win.
        hidden = {"prompt", "messages"} if {"prompt", "messages"} & values.keys() else set()
        hidden |= set(self.columns.values())
        return {**{name: value for name, value in row.items() if name not in hidden}, **values}

    def _value(self, location: str, row: Mapping[str, Any], field: str, column: str) -> Any:
        value: Any = row
        for name in [column] if column in row else column.split("."):
            if not isinstance(value, Mapping) or name not in value:
                where = f"{location}: columns.{field}: there is no column {column!r}"
                raise TasksError(f"{where}. {did_you_mean(column, list(row)).replace('Known', 'Its columns')}")
            value = value[name]
        return value


class JsonlTasks(FileTasks):
    """A file with one JSON object per line."""

    type: Literal["jsonl"] = "jsonl"

    def rows(self, scenario_dir: Path) -> Iterable[Mapping[str, Any]]:
        return (row for _, row in self.located_columns(scenario_dir))

    def located_columns(self, scenario_dir: Path) -> Iterator[tuple[str, Any]]:
        with (scenario_dir / self.path).open("rb") as lines:
            for number, line in enumerate(lines, 1):
                location = f"{self.path}, line {number}"
                if line.strip():
                    try:
                        yield location, orjson.loads(line)
                    except orjson.JSONDecodeError as error:
                        raise TasksError(f"{location}: {error}") from error


class ParquetTasks(FileTasks):
    """A Parquet file with a row per task."""

    type: Literal["parquet"] = "parquet"

    def rows(self, scenario_dir: Path) -> Iterable[Mapping[str, Any]]:
        parquet = _import("pyarrow.parquet", "Parquet", "parquet")
        return parquet.read_table(scenario_dir / self.path).to_pylist()  # type: ignore[no-any-return]


class DatasetsTasks(FileTasks):
    """A folder of Hugging Face `datasets`: what `save_to_disk` wrote, or data files (JSONL, Parquet, CSV, ...)."""

    type: Literal["datasets"] = "datasets"
    path: str
    """The folder, relative to the scenario. Nothing is downloaded."""
    split: str | None = None
    """Its split, such as "train"; needed if it has several."""

    def label(self) -> str:
        return self.name or ".".join(filter(None, (Path(self.path).name, self.split)))

    def rows(self, scenario_dir: Path) -> Iterable[Mapping[str, Any]]:
        folder = scenario_dir / self.path
        if not folder.is_dir():
            raise TasksError(f"folder {self.path!r} not found in {scenario_dir}")
        datasets = _import("datasets", "a folder of datasets", "datasets")
        is_saved = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
        # Streamed, because otherwise data files are first copied to a cache in the home directory.
        splits = datasets.load_from_disk(folder) if is_saved else datasets.load_dataset(str(folder), streaming=True)
        if not isinstance(splits, Mapping):
            splits = {str(splits.split or "train"): splits}
        names = list(splits)
        if self.split is None and len(names) > 1:
            raise TasksError(f"{self.path!r} has several splits; set `split` to one of {', '.join(names)}")
        split = names[0] if self.split is None else self.split
        if split not in splits:
            raise TasksError(f"{self.path!r} has no split {split!r}. {did_you_mean(split, names)}")
        return splits[split]  # type: ignore[no-any-return]


def _import(module: str, what: str, extra: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise TasksError(f"reading {what} needs: pip install 'loopwright[{extra}]'") from error
