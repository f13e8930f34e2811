"""Probing: find out the spaces of a user's server before a run starts.

If its class declares them they are read from there. Otherwise a server is created and closed in a separate process:
most environments set their spaces in `__init__`, and one created in this process would hold resources (a device, a
port, GPU memory) that the run's own server needs. A server must therefore allow being created twice.
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

_TIMEOUT_S = 60.0
_cache: dict[tuple[str, str, str], "ServerSpaces"] = {}


@dataclass(frozen=True)
class ServerSpaces:
    """A server's spaces, None where unknown, or why it cannot be created."""

    observation_space: Any = None
    action_space: Any = None
    problem: str | None = None


def probe_spaces(path: str, args: Mapping[str, Any], directory: Path) -> ServerSpaces:
    """The spaces of the server at this path. If it takes too long or ends its process, they stay unknown."""
    key = path, repr(sorted(args.items(), key=str)), str(directory)
    if key not in _cache:
        probe = _probe_registered if path.startswith(GYMNASIUM) else _probe_class
        _cache[key] = probe(path, args, directory)
    return _cache[key]


def _probe_registered(path: str, args: Mapping[str, Any], directory: Path) -> ServerSpaces:
    try:
        env = make_server(path, args, directory)
        env.close()
    except LoopwrightError as error:
        return ServerSpaces(problem=str(error))
    except Exception:  # noqa: BLE001  reported when the run starts it
        return ServerSpaces()
    return ServerSpaces(env.observation_space, env.action_space)


def _probe_class(path: str, args: Mapping[str, Any], directory: Path) -> ServerSpaces:
    try:
        target = resolve(path, directory)
    except LoopwrightError:
        return ServerSpaces()  # reported by check_server_class
    observation_space, action_space = (_class_space(target, name) for name in ("observation_space", "action_space"))
    if observation_space is None or action_space is None:
        return _probe_in_process(path, args, directory)
    return ServerSpaces(observation_space, action_space)


def _class_space(target: Any, name: str) -> Any:
    """A space that a class declares, or None if the constructor of a subclass may replace it."""
    space = getattr(target, name, None)
    if not isinstance(target, type) or not hasattr(space, "contains"):
        return None  # a property needs an object
    first = next(kind for kind in target.__mro__ if {name, "__init__", "__new__"} & vars(kind).keys())
    return space if name in vars(first) else None


def _probe_in_process(path: str, args: Mapping[str, Any], directory: Path) -> ServerSpaces:
    with tempfile.TemporaryDirectory(prefix="loopwright-probe-") as folder:
        request, response = Path(folder, "request"), Path(folder, "response")
        request.write_bytes(pickle.dumps((path, dict(args), str(directory), sys.path)))
        # In a new process group, so that its children are killed with it.
        process = subprocess.Popen(
            [sys.executable, "-c", "from loopwright.envs.live.probe import main; main()", str(request), str(response)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        pidfd = os.pidfd_open(process.pid)
        try:
            select.select([pidfd], [], [], _TIMEOUT_S)
        finally:
            os.close(pidfd)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # before wait(), while the process id cannot be reused
            process.wait()
        try:
            spaces = pickle.loads(response.read_bytes())  # noqa: S301  written by our own process
        except Exception:  # noqa: BLE001  no response, or spaces that only that process can unpickle
            return ServerSpaces()
    return spaces if isinstance(spaces, ServerSpaces) else ServerSpaces()


def main() -> None:
    """In the probe's process: create the server, write its spaces to the response file, close it."""
    request, response = map(Path, sys.argv[1:])
    path, args, directory, sys.path[:] = pickle.loads(request.read_bytes())  # noqa: S301  written by our own process
    # A module that only the other process can import is not the server's fault: this raises, without a response.
    resolve(path, Path(directory))
    try:
        server = make_server(path, args, Path(directory))
        spaces = ServerSpaces(server.observation_space, server.action_space)
    except LoopwrightError as error:
        spaces = ServerSpaces(problem=str(error))
    response.with_suffix(".new").write_bytes(pickle.dumps(spaces))
    response.with_suffix(".new").replace(response)
    if spaces.problem is None:
        server.close()
