"""The checker: turns the tables of a scenario into configs and collects every problem on the way."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from loopwright.core.config import explain
from loopwright.core.errors import Problem, did_you_mean
from loopwright.core.registry import Registry
from loopwright.execution.local.system import LocalSystem
from loopwright.execution.system import SystemConfig

M = TypeVar("M", bound=BaseModel)


class Checker:
    """Collects problems, each with its key and the fix. A broken table becomes None and does not hide the next one."""

    def __init__(self, directory: Path, problems: Iterable[Problem] = ()) -> None:
        self.directory = directory
        self.problems = list(problems)
        self.system: SystemConfig = LocalSystem()
        """The scenario's system; that of a broken table is local."""
        self.has_server = False
        """Whether the caller passes the server of a live run."""
        self.suffix = ""
        """Added to each key, where a scenario has several runs."""

    def add(self, key: str, message: str) -> None:
        """Report one problem."""
        self.problems.append(Problem(f"{key.strip()}{self.suffix}", message))

    def add_all(self, table: str, problems: Iterable[Problem]) -> None:
        """Report the problems of a table. A key in brackets belongs to another table."""
        for problem in problems:
            self.add(problem.key if problem.key.startswith("[") else f"{table} {problem.key}", problem.message)

    def model(self, table: str, raw: Any, model: type[M]) -> M | None:
        """The table as a config."""
        try:
            return model.model_validate(raw)
        except ValidationError as error:
            for key, message in explain(error, model):
                self.add(f"{table} {key}", message if message.endswith((".", "?")) else f"{message}.")
        return None

    def registered(self, table: str, raw: Any, registry: Registry[Any]) -> Any:
        """The class that the table's `type` names."""
        if isinstance(raw, list):
            self.add(table, "must be one table, not a list; double brackets, [[…]], make a list.")
            return None
        if not isinstance(raw, dict) or "type" not in raw:
            self.add(f"{table} type", f"is missing. {did_you_mean('', registry.names())}")
            return None
        try:
            return registry.get(str(raw["type"]))
        except KeyError as error:
            self.add(f"{table} type", error.args[0])
        except ImportError as error:
            self.add(f"{table} type", f"{raw['type']!r} cannot be used: {error}.")
        return None

    def configured(self, table: str, raw: Any, registry: Registry[Any]) -> tuple[Any, Any]:
        """The class that the table's `type` names, and the table as its config, with that config's own problems."""
        item = self.registered(table, raw, registry)
        config = self.model(table, raw, item.Config) if item is not None else None
        if config is not None:
            self.add_all(table, config.problems(self.directory))
        return item, config

    def unknown_keys(self, table: str, raw: Mapping[str, Any], model: type[BaseModel]) -> None:
        """Report the keys that the model does not have."""
        fields = list(model.model_fields)
        for key in raw:
            if key not in fields:
                self.add(table, f"unknown key {key!r}. {did_you_mean(key, fields)}")
