"""Probing: what spaces a server of the user's own has, before a run starts.

Where its class shows them they are read there. Otherwise it is made once, and closed, in a process that is thrown away:
most environments set their spaces in `__init__`, and one that was made here would keep what it took (a device, a port,
memory of a GPU) from the one that the run makes. It has to live with being made twice.
"""

import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopwright.core.errors import LoopwrightError
from loopwright.envs.live.server import GYMNASIUM, make_server, resolve

_DEADLINE_S = 60.0
_known: dict[tuple[str, str, str], "Declared"] = {}


@dataclass(frozen=True)
class Declared:
    """A server's spaces as far as they are known, or why it cannot be made."""

    observation_space: Any = None
    action_space: Any = None
    problem: str | None = None


def declared(path: str, args: Mapping[str, Any], home: Path) -> Declared:
    """The spaces of the server at this path. One that takes too long, or ends its process, is left for the run."""
    key = path, repr(sorted(args.items(), key=str)), str(home)
    if key not in _known:
        _known[key] = _registered(path, args, home) if path.startswith(GYMNASIUM) else _own(path, args, home)
    return _known[key]


def _registered(path: str, args: Mapping[str, Any], home: Path) -> Declared:
    try:
        env = make_server(path, args, home)
        env.close()
    except LoopwrightError as error:
        return Declared(problem=str(error))
    except Exception:  # noqa: BLE001  whatever is wrong with it is told when it is started
        return Declared()
    return Declared(env.observation_space, env.action_space)


def _own(path: str, args: Mapping[str, Any], home: Path) -> Declared:
    try:
        found = resolve(path, home)
    except LoopwrightError:
        return Declared()  # told where the path is checked
    seen, taken = (_shown(found, which) for which in ("observation_space", "action_space"))
    return _made_elsewhere(path, args, home) if seen is None or taken is None else Declared(seen, taken)


def _shown(found: Any, which: str) -> Any:
    """A space that stands in the class; None if a constructor further down may set another one."""
    space = getattr(found, which, None)
    if not isinstance(found, type) or not hasattr(space, "contains"):
        return None  # a property tells nothing before there is an object
    first = next(kind for kind in found.__mro__ if {which, "__init__", "__new__"} & vars(kind).keys())
    return space if which in vars(first) else None


def _made_elsewhere(path: str, args: Mapping[str, Any], home: Path) -> Declared:
    with tempfile.TemporaryDirectory(prefix="loopwright-probe-") as folder:
        request, answer = Path(folder, "request"), Path(folder, "answer")
        request.write_bytes(pickle.dumps((path, dict(args), str(home), sys.path)))
        # A group of its own, so that what it has started is ended with it.
        process = subprocess.Popen(
            [sys.executable, "-c", "from loopwright.envs.live.probe import main; main()", str(request), str(answer)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        ended = os.pidfd_open(process.pid)
        try:
            select.select([ended], [], [], _DEADLINE_S)
        finally:
            os.close(ended)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # before it is waited for: until then the number is its own
            process.wait()
        try:
            found = pickle.loads(answer.read_bytes())  # noqa: S301  our own process wrote it
        except Exception:  # noqa: BLE001  no answer, or spaces that only it can read
            return Declared()
    return found if isinstance(found, Declared) else Declared()


def main() -> None:
    """In that process: make the server, close it, write down what it has."""
    request, answer = map(Path, sys.argv[1:])
    path, args, home, sys.path[:] = pickle.loads(request.read_bytes())  # noqa: S301  our own process wrote it
    # A module that the other process has, and this one has not, is no problem of the server.
    resolve(path, Path(home))
    try:
        server = make_server(path, args, Path(home))
        found = Declared(server.observation_space, server.action_space)
    except LoopwrightError as error:
        found = Declared(problem=str(error))
    answer.with_suffix(".new").write_bytes(pickle.dumps(found))
    answer.with_suffix(".new").replace(answer)
    if found.problem is None:
        server.close()
