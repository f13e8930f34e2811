"""Registries: names in TOML to classes in Python, ours and those of installed packages."""

from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from loopwright.core.errors import did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """A family of things found by name.

    Another package joins by an entry point, so that its name works in a scenario once it is installed:

        [project.entry-points."loopwright.agents"]
        annealing = "my_package:Annealing"
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind, self.group = kind, group
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
                    self._lazy.setdefault(point.name, point.value)
        return list(dict.fromkeys([*self._lazy, *self._found]))

    def get(self, name: str) -> T:
        """The item of that name, or a KeyError that says which names there are."""
        if name not in self._found:
            if name not in self.names():
                raise KeyError(f"unknown {self.kind} {name!r}. {did_you_mean(name, self.names())}")
            module, _, attribute = self._lazy[name].partition(":")
            self._found[name] = getattr(import_module(module), attribute)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
