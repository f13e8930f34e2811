"""Modules that are imported when they are first used, so that a command that does not need them starts at once."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import LazyLoader, find_spec, module_from_spec
from types import ModuleType
from typing import Any

from loopwright.core.errors import MissingExtra

_EXTRAS = {"gymnasium": "rl", "stable_baselines3": "rl", "ray": "ray"}
"""Packages whose absence is reported as a missing extra."""


def lazy_module(name: str) -> ModuleType:
    """The module of that name, loaded at the first access to something in it."""
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


def lazy_exports(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package that imports each public name from its module when it is first used.

    __getattr__ = lazy_exports(__name__, {"RemoteServer": "live.remote", "serve": "live.serve"})
    """

    def load(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"{package}.{names[name]}"), name)
        except ModuleNotFoundError as error:
            if error.name not in _EXTRAS:
                raise
            raise MissingExtra(name, _EXTRAS[error.name]) from error

    return load
