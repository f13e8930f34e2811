"""Objects of the calling program that a scenario names: functions, loops, judgers and engines handed to the Python API.

`register` gives an object a name of the form `loopwright.api.objects:name`, which resolves in this process only.
"""

from typing import Any

_objects: dict[str, Any] = {}


def register(name: str, item: Any) -> str:
    """Give an object a name that a scenario can use in this process; a later object of the same name replaces it."""
    _objects[name] = item
    return f"{__name__}:{name}"


def __getattr__(name: str) -> Any:
    try:
        return _objects[name]
    except KeyError:
        raise AttributeError(
            f"{name!r} belongs to the Python program that started this study; continue it there, with the same call"
        ) from None
