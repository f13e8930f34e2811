"""Importing what a scenario names as `module:attribute`, from the scenario's directory first."""

import sys
from collections.abc import Callable
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any


def import_function(path: str, directory: Path) -> Callable[..., Any]:
    """The callable that `module:attribute` names. ImportError or ValueError says why it cannot be used."""
    if all(path.partition(":")):
        look_first_in(directory)
    function = import_object(path)
    if not callable(function):
        raise ValueError(f"{path.partition(':')[2]} cannot be called")
    return function  # type: ignore[no-any-return]


def import_object(path: str) -> Any:
    """The object that `module:attribute` names. ImportError or ValueError says why there is none."""
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


def look_first_in(directory: Path) -> None:
    """Make this directory the first place where modules are searched."""
    place = str(directory.absolute())
    if sys.path[:1] != [place]:
        if place in sys.path:
            sys.path.remove(place)
        sys.path.insert(0, place)
    invalidate_caches()  # a module may have been written a moment ago
