"""Imports by name: `module:attribute` of a scenario, and modules that are loaded when they are first used."""

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module, invalidate_caches
from importlib.machinery import PathFinder
from importlib.util import LazyLoader, find_spec, module_from_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_EXTRAS = {
    "aiohttp": "gateway",
    "gymnasium": "rl",
    "prometheus_client": "gateway",
    "ray": "ray",
    "stable_baselines3": "rl",
    "tokenizers": "gateway",
}
"""Packages whose absence is reported as a missing extra."""
_scenario_places = set[str]()
"""The directories that `look_first_in` was called with."""


def import_function(path: str, directory: "Path") -> Callable[..., Any]:
    """The callable that `module:attribute` names. ImportError or ValueError says why it cannot be used."""
    if all(path.partition(":")):
        look_first_in(directory)
    function = import_object(path)
    if not callable(function):
        raise ValueError(f"{path.partition(':')[2]} cannot be called")
    return function  # type: ignore[no-any-return]


def import_object(path: str) -> Any:
    """The object that `module:attribute` names. ImportError or ValueError gives the reason without one."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError("write it as module:name")
    try:
        item: Any = import_module(module)
    except ImportError:
        raise
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise ImportError(f"importing {module} failed: {type(error).__name__}: {error}") from error
    try:
        for part in name.split("."):
            item = getattr(item, part)
    except AttributeError as error:
        raise ImportError(str(error)) from error
    return item


def look_first_in(directory: "Path") -> None:
    """Make this directory the first place where modules are searched.

    A module of the same name that another scenario of this process has beside it is not taken for the one in here.
    """
    place = str(directory.absolute())
    invalidate_caches()  # a module may have been written a moment ago
    if sys.path[:1] != [place]:
        if place in sys.path:
            sys.path.remove(place)
        sys.path.insert(0, place)
        others = _scenario_places - {place}
        for name in {loaded.partition(".")[0] for loaded in sys.modules} if others else ():
            if PathFinder.find_spec(name, [place]) is None:
                continue
            module = sys.modules.get(name)
            # A package without `__init__.py` may lie in several directories.
            locations = getattr(module, "__path__", None) or [getattr(module, "__file__", None) or "/builtin"]
            folders = {os.path.dirname(location) for location in locations}  # noqa: PTH120  loads faster
            if not others.isdisjoint(folders):
                for loaded in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
                    del sys.modules[loaded]
        _scenario_places.add(place)


def lazy_module(name: str) -> ModuleType:
    """A top-level module, loaded when something in it is first used, so that other commands start faster.

    Not for a submodule: a later `import` would find it in `sys.modules` and not set it as an attribute of its package.
    """
    if name in sys.modules:
        return sys.modules[name]
    spec = find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    spec.loader = LazyLoader(spec.loader)
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def import_with_extra(module: str, what: str) -> ModuleType:
    """Import a module of this package. If a package that it needs is missing, MissingExtra names `what` and the fix."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        from loopwright.core.errors import MissingExtra

        raise MissingExtra(what, _EXTRAS[error.name]) from error


def lazy_exports(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package that imports each public name from its module when it is first used.

    if TYPE_CHECKING:
        from loopwright.envs.live.remote import RemoteServer

    __getattr__ = lazy_exports(__name__)

    The block for type checkers says which names there are, and where, so that they are listed once. The names of one
    line arrive together, and are ordinary attributes from then on.
    """

    @cache
    def modules() -> dict[str, str]:
        import ast  # not at the top, where it would slow down `import loopwright`

        statements = ast.parse(sys.modules[package].__loader__.get_source(package)).body  # type: ignore[union-attr]
        blocks = [statement.body for statement in statements if isinstance(statement, ast.If)]
        imports = [line for block in blocks for line in block if isinstance(line, ast.ImportFrom)]
        return {alias.name: str(line.module) for line in imports for alias in line.names}

    def load(name: str) -> Any:
        # Python asks for names such as `__path__`, which no module exports.
        if name.startswith("__") or name not in modules():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, namespace = import_with_extra(modules()[name], name), vars(sys.modules[package])
        for each, source in modules().items():
            if source == modules()[name]:
                namespace.setdefault(each, getattr(module, each))
        return getattr(module, name)

    return load
