"""Registries: names in TOML to classes in Python. Ours, those of installed packages, and those beside a scenario."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import entry_points
from inspect import isabstract
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from loopwright.core.config import Explained, explain
from loopwright.core.errors import did_you_mean
from loopwright.core.imports import import_object, look_first_in

T = TypeVar("T")


class Registry(Generic[T]):
    """A family of classes, each found by the `type` that a scenario gives it.

    Another package joins by an entry point, so that its name works in a scenario once it is installed:

        [project.entry-points."loopwright.agents"]
        annealing = "my_package:Annealing"

    A type with a colon, `type = "annealing:Annealing"`, is a class in a module that can be imported; `load` and others
    that read a scenario make its directory the first place to look.
    """

    def __init__(self, kind: str, group: str, base: type = object, public_base: str = "") -> None:
        self.kind, self.group, self.base = kind, group, base
        self.public_base = public_base or base.__name__
        """The class in `loopwright` that users extend."""
        self._items: dict[str, T] = {}
        self._paths: dict[str, str] = {}
        self._scanned = False

    def add(self, name: str, item: T) -> None:
        """Register a class, as tests and notebooks do."""
        self._items[name] = item

    def add_lazily(self, name: str, path: str) -> None:
        """Register `module:attribute`, imported when it is first used."""
        self._paths[name] = path

    def names(self) -> list[str]:
        """All registered names, ours first, in the order of registration."""
        if not self._scanned:
            self._scanned = True
            for point in entry_points(group=self.group):
                if point.name not in self._items:
                    self._paths.setdefault(point.name, f"{point.module}:{point.attr}")
        return list(dict.fromkeys([*self._paths, *self._items]))

    def get(self, name: str) -> T:
        """The class of a registered name or of `module:Class`.

        A KeyError lists the names that exist; an ImportError says why a class cannot be used.
        """
        if ":" in name:
            return self._user_class(name)
        if name not in self._items:
            if name not in self.names():
                raise KeyError(f"unknown {self.kind} {name!r}. {did_you_mean(name, self.names())}")
            try:
                item = resolve_name(self._paths[name])
            except AttributeError as error:
                raise ImportError(f"{self._paths[name]!r}: {error}") from error
            self._items[name] = self._check(item, self._paths[name])
        return self._items[name]

    def working(self) -> dict[str, T]:
        """Every class that can be imported: a broken package must not hide the others."""
        items = {}
        for name in self.names():
            with suppress(ImportError):
                items[name] = self.get(name)
        return items

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _check(self, item: Any, path: str) -> Any:
        if not (isinstance(item, type) and issubclass(item, self.base)):
            raise ImportError(f"{path!r} is not a subclass of loopwright.{self.public_base}")
        return item

    def _user_class(self, path: str) -> T:
        module = path.partition(":")[0]
        try:
            item = self._check(import_object(path), path)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise ImportError(
                f"{error}. Put {module.replace('.', '/')}.py beside the scenario, or install it"
            ) from error
        except ValueError as error:
            raise ImportError(str(error)) from error
        if isabstract(item):
            raise ImportError(f"{path!r} does not implement {', '.join(sorted(item.__abstractmethods__))}")
        config = item if isinstance(item, type) and issubclass(item, BaseModel) else getattr(item, "Config", None)
        if isinstance(config, type) and issubclass(config, BaseModel):
            # A config made for a registered name, `type: Literal["annealing"]`, must accept this one, too.
            field = config.model_fields.get("type")
            if field is not None and field.annotation is not str:
                field.annotation = str
                config.model_rebuild(force=True)
        return item  # type: ignore[no-any-return]


def look_for_types(raw: Any, directory: Path) -> None:
    """If a table has a `type = "module:Class"`, make `directory` the first place to look for its module."""
    tables = [raw]
    while tables:
        table = tables.pop()
        if isinstance(table, Mapping):
            if isinstance(table.get("type"), str) and ":" in table["type"]:
                look_first_in(directory)
                return
            tables += table.values()
        elif isinstance(table, list | tuple):
            tables += table


def config_parser(registry: Registry[Any]) -> Callable[[Any], BaseModel]:
    """A validator that turns a table into the config that its `type` names; a ValueError lists everything wrong."""

    def parse(raw: Any) -> BaseModel:
        if isinstance(raw, BaseModel):
            return raw
        if not isinstance(raw, Mapping) or not isinstance(raw.get("type"), str):
            raise ValueError(f"must be a table with a `type`. {did_you_mean('', registry.names())}")
        try:
            item = registry.get(raw["type"])
        except KeyError as error:
            raise ValueError(error.args[0]) from None
        except ImportError as error:
            raise ValueError(f"{registry.kind} {raw['type']!r} cannot be used: {error}") from error
        # Some registries hold configs, others the classes that they configure.
        model: type[BaseModel] = item if issubclass(item, BaseModel) else item.Config
        try:
            return model.model_validate(dict(raw))
        except ValidationError as error:
            raise Explained(explain(error, model)) from error
        except Exception as error:  # a user's class may be half written, or have validators that fail
            raise ValueError(f"{registry.kind} {raw['type']!r} is broken: {type(error).__name__}: {error}") from error

    return parse
