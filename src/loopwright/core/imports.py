"""Importing what a scenario names as `module:attribute`, from the scenario's directory first."""

import sys
from collections.abc import Callable
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any


def import_function(path: str, home: Path) -> Callable[..., Any]:
    """The callable that `module:attribute` names. ImportError or ValueError says why there is none."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError("write it as module:name")
    look_first_in(home)
    try:
        found: Any = import_module(module)
    except ImportError:
        raise
    except (Exception, SystemExit) as error:  # a module of the user's own may do anything
        raise ImportError(f"importing {module} failed: {type(error).__name__}: {error}") from error
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise ImportError(str(error)) from error
    if not callable(found):
        raise ValueError(f"{name} cannot be called")
    return found  # type: ignore[no-any-return]


def look_first_in(home: Path) -> None:
    """Make modules in this directory the first that are found."""
    place = str(home.absolute())
    if sys.path[:1] != [place]:
        if place in sys.path:
            sys.path.remove(place)
        sys.path.insert(0, place)
    invalidate_caches()  # a module may have been written a moment ago
