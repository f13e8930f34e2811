"""Shipping a Python function to worker processes: by name if it can be imported, otherwise by value."""

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from types import FunctionType
from typing import Any

from loopwright.api.resume import ADVICE
from loopwright.core.errors import LedgerError, storage

MODULE = "shipped_function"
"""The module through which workers import a pickled function."""
_LOADER = '''"""Written by loopwright.tune: the tuned function, pickled by value. Version {digest}."""

from pathlib import Path

import cloudpickle

{name} = cloudpickle.loads(Path(__file__).with_name("function.pkl").read_bytes())
'''


def import_path(function: Callable[..., Any]) -> str | None:
    """`module:name`, if a fresh process can import the function under that name."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or "<" in name:
        return None
    try:
        target: Any = import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError):
        return None
    return f"{module}:{name}" if target is function and getattr(import_module(module), "__file__", None) else None


def write_pickle(function: Callable[..., Any], directory: Path) -> str | None:
    """Pickle a function by value into a directory, with a module that loads it; None if it cannot be pickled.

    Returns `module:name`. The module changes only when the function's code or the values it captures change, so that
    the fingerprint of a study does too. If the directory belongs to a study of another function, LedgerError.
    """
    import cloudpickle

    try:
        data = cloudpickle.dumps(function)
    except Exception:  # noqa: BLE001  Whatever the captured objects raise, they cannot be shipped.
        return None
    own_name = getattr(function, "__name__", "")
    name = own_name if own_name.isidentifier() and not iskeyword(own_name) else "function"
    module, text = directory / f"{MODULE}.py", _LOADER.format(name=name, digest=code_digest(function))
    with storage(directory, then="nothing was started"):
        directory.mkdir(parents=True, exist_ok=True)
        if (directory.parent / "campaign.json").exists() and module.exists() and module.read_text() != text:
            raise LedgerError(
                f"{directory.parent} contains a study of another function: its name, code or captured values "
                f"have changed since. {ADVICE}"
            )
        (directory / "function.pkl").write_bytes(data)
        module.write_text(text)
    return f"{MODULE}:{name}"


def search_path() -> list[str]:
    """Where this process finds modules besides the installed ones, for workers that must find the same."""
    installed = (sys.prefix, sys.base_prefix)
    paths = [str(Path(entry or ".").absolute()) for entry in sys.path]
    return [path for path in dict.fromkeys(paths) if Path(path).is_dir() and not path.startswith(installed)]


def code_digest(function: Callable[..., Any]) -> str:
    """A hash of a function's source and of the plain values it captures; equal for the same notebook cell run again."""
    digest = hashlib.blake2b(_source(function).encode(), digest_size=16)
    if isinstance(inspect.unwrap(function), FunctionType):
        captured = inspect.getclosurevars(inspect.unwrap(function))
        digest.update(_describe(captured.nonlocals).encode())
        digest.update(_describe(captured.globals).encode())
        digest.update(_describe(dict(enumerate(function.__defaults__ or ()))).encode())
    return digest.hexdigest()


def _source(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return repr(function) if code is None else f"{code.co_code!r} {code.co_names} {code.co_varnames}"


def _describe(values: Mapping[Any, Any]) -> str:
    """Captured values as text: plain ones by content, functions by source, anything else by type."""
    return json.dumps(
        {str(name): value for name, value in sorted(values.items(), key=lambda item: str(item[0]))},
        default=lambda value: _source(value) if isinstance(value, FunctionType) else type(value).__qualname__,
        skipkeys=True,
        sort_keys=False,
    )
