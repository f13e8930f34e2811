"""Probing: find out what a user's server is like before a run starts: its spaces, and whether it applies a regime.

If its class declares its spaces they are read from there. Otherwise a server is created and closed in a separate
process: most environments set their spaces in `__init__`, and one created in this process would hold resources (a
device, a port, GPU memory) that the run's own server needs. A server must therefore allow being created twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loopwright.core.errors import LoopwrightError
from loopwright.envs.live.regime_server import ServerTarget, unacknowledged
from loopwright.envs.live.server import GYMNASIUM, ServerLost, resolve

_TIMEOUT_S = 60.0
_cache: dict[str, "ServerSpaces"] = {}


@dataclass(frozen=True)
class ServerSpaces:
    """A server's spaces, None where unknown, or why it cannot be created."""

    observation_space: Any = None
    action_space: Any = None
    problem: str | None = None
    unacknowledged: tuple[str, ...] = ()
    """The arguments of the regime that its reset did not acknowledge."""


def probe_spaces(target: ServerTarget, regime: Mapping[str, Any] | None = None) -> ServerSpaces:
    """The spaces of a server. If it takes too long or ends its process, they stay unknown.

    With a regime, an episode is begun under it, to see what the server acknowledges.
    """
    key = repr((target, regime or {}))
    if key not in _cache:
        _cache[key] = _probe(target, regime or {})
    return _cache[key]


def _probe(target: ServerTarget, regime: Mapping[str, Any]) -> ServerSpaces:
    try:
        if not regime and target.path.startswith(GYMNASIUM):
            env = target.make()
            env.close()
            return ServerSpaces(env.observation_space, env.action_space)
        if not regime and not target.wrappers and not target.path.startswith(GYMNASIUM):
            kind = resolve(target.path, target.directory)
            declared = [_class_space(kind, name) for name in ("observation_space", "action_space")]
            if None not in declared:
                return ServerSpaces(*declared)
        return _probe_in_process(target, regime)
    except ServerLost:
        return ServerSpaces()
    except LoopwrightError as error:
        return ServerSpaces(problem=str(error))
    except Exception:  # noqa: BLE001  reported when the run starts it
        return ServerSpaces()


def _class_space(target: Any, name: str) -> Any:
    """A space that a class declares, or None if the constructor of a subclass may replace it."""
    space = getattr(target, name, None)
    if not isinstance(target, type) or not hasattr(space, "contains"):
        return None  # a property needs an object
    first = next(kind for kind in target.__mro__ if {name, "__init__", "__new__"} & vars(kind).keys())
    return space if name in vars(first) else None


def _probe_in_process(target: ServerTarget, regime: Mapping[str, Any]) -> ServerSpaces:
    from loopwright.envs.live.isolated import IsolatedServer  # requires msgpack and gymnasium

    server = IsolatedServer(target, timeout_s=_TIMEOUT_S)
    try:
        missing: list[str] = []
        if regime:
            _, info = server.reset(seed=None, options={"env_params": dict(regime)})
            missing = unacknowledged(regime, info)
        return ServerSpaces(server.observation_space, server.action_space, unacknowledged=tuple(missing))
    finally:
        server.close()
