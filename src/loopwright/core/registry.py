"""Registries: names in TOML to classes in Python, ours and those of installed packages."""

from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Generic, TypeVar

from loopwright.core.errors import did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """A family of things found by name.

    Another package joins by an entry point, so that its name works in a scenario once it is installed:

        [project.entry-points."loopwright.agents"]
        annealing = "my_package:Annealing"
    """

    def __init__(self, kind: str, group: str, base: type | None = None) -> None:
        self.kind, self.group, self.base = kind, group, base
        self._found: dict[str, T] = {}
        self._lazy: dict[str, str] = {}
        self._scanned = False

    def add(self, name: str, item: T) -> None:
        """Register an item by hand, as tests and notebooks do."""
        self._found[name] = item

    def add_lazily(self, name: str, path: str) -> None:
        """Register `module:attribute`, imported when it is first asked for."""
        self._lazy[name] = path

    def names(self) -> list[str]:
        """All names, ours first, in the order of registration."""
        if not self._scanned:
            self._scanned = True
            for point in entry_points(group=self.group):
                if point.name not in self._found:
                    self._lazy.setdefault(point.name, f"{point.module}:{point.attr}")
        return list(dict.fromkeys([*self._lazy, *self._found]))

    def get(self, name: str) -> T:
        """The item of that name; a KeyError says which names there are, an ImportError why it cannot be had."""
        if name not in self._found:
            if name not in self.names():
                raise KeyError(f"unknown {self.kind} {name!r}. {did_you_mean(name, self.names())}")
            try:
                item = resolve_name(self._lazy[name])
            except AttributeError as error:
                raise ImportError(f"{self._lazy[name]!r}: {error}") from error
            if self.base is not None and not (isinstance(item, type) and issubclass(item, self.base)):
                raise ImportError(f"{self._lazy[name]!r} is no subclass of loopwright.{self.base.__name__}")
            self._found[name] = item
        return self._found[name]

    def working(self) -> dict[str, T]:
        """All that can be imported: a broken package must not hide the others."""
        found = {}
        for name in self.names():
            with suppress(ImportError):
                found[name] = self.get(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
