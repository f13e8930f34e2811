"""Servers: what a live environment is stepped by. Every `gymnasium.Env` is one as it stands."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat, cast

from loopwright.core.errors import LoopwrightError, MissingExtra, did_you_mean
from loopwright.core.imports import look_first_in

if TYPE_CHECKING:
    from gymnasium import Space

GYMNASIUM = "gymnasium:"
"""What begins the path of an environment in gymnasium's registry."""
_METHODS = ("reset", "step", "close")
_SPACES = ("observation_space", "action_space")


class ServerLost(LoopwrightError, ConnectionError):
    """The server died, hangs, or is none of ours: the episode is gone, and the next `reset()` looks for it again."""


class ServerError(LoopwrightError, ValueError):
    """The server is there, but what it said cannot be used; the message names the field."""


class GymServer(Protocol):
    """Steps a live environment. Inherit nothing: have the members.

    class Thermostat:
        observation_space = gymnasium.spaces.Box(-20, 60, (1,))
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.celsius = 15.0
            return np.array([self.celsius], np.float32), {}

        def step(self, action):
            self.celsius += 0.5 if action else -0.3
            return np.array([self.celsius], np.float32), -abs(self.celsius - 20), False, False, {}

        def close(self): ...
    """

    @property
    def observation_space(self) -> "Space[Any]":
        """What `reset` and `step` show."""

    @property
    def action_space(self) -> "Space[Any]":
        """What `step` takes."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode: its first observation, and info."""

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Act: observation, reward, terminated, truncated, info."""

    def close(self) -> None:
        """Let go of everything."""


def make_server(target: str | object, args: Mapping[str, Any], home: Path) -> GymServer:
    """The server that is meant: an object as it is, a class or factory called, `gymnasium:ID` by gymnasium's registry.

    A path, `module:Class` or `module.Class`, is looked for in `home` first. A class or factory gets those of `args`
    that it takes; gymnasium gets them all.
    """
    if isinstance(target, str) and target.startswith(GYMNASIUM):
        return _registered(target.removeprefix(GYMNASIUM), args)
    name = target if isinstance(target, str) else getattr(target, "__qualname__", type(target).__name__)
    found: Any = resolve(target, home) if isinstance(target, str) else target
    if isinstance(found, type) or (callable(found) and not hasattr(found, "step")):
        try:
            found = found(**_taken(found, args))
        except LoopwrightError:
            raise
        except (Exception, SystemExit) as error:
            raise ServerError(f"{name!r} cannot be made: {type(error).__name__}: {error}") from error
    if missing := [member for member in (*_SPACES, *_METHODS) if not hasattr(found, member)]:
        raise ServerError(f"{name!r} is no GymServer: it has no {', '.join(missing)}. A gymnasium.Env has them all.")
    return cast("GymServer", found)


def check_server_class(path: str, home: Path) -> str | None:
    """Why no server can be made of this path, in words; None if one can, as far as can be told without making it."""
    try:
        if path.startswith(GYMNASIUM):
            return _unregistered(path.removeprefix(GYMNASIUM))
        found = resolve(path, home)
    except LoopwrightError as error:
        return str(error)
    if not callable(found):
        return f"{path!r} is {_a(type(found).__name__)}, not a class. Name a class, or a function that makes a server."
    # Only a class shows its methods before it is called; spaces are mostly set by its constructor.
    missing = [name for name in _METHODS if isinstance(found, type) and not callable(getattr(found, name, None))]
    if missing:
        return f"{path!r} is no GymServer: it has no method {', '.join(missing)}. A gymnasium.Env has them all."
    return None


def resolve(path: str, home: Path) -> Any:
    """The class or factory at `module:Class` or `module.Class`; a ServerError says what is not there."""
    module_name, colon, attribute = path.partition(":")
    if not colon:
        module_name, _, attribute = path.rpartition(".")
    if not module_name or not attribute:
        raise ServerError(f"{path!r} has no module part. Write 'module:Class' or 'module.Class'.")
    look_first_in(home)
    found: Any = _module(path, module_name, home)
    for name in attribute.split("."):
        if not hasattr(found, name):
            public = [known for known in vars(found) if not known.startswith("_")] if hasattr(found, "__dict__") else []
            raise ServerError(f"{path!r}: {module_name!r} has no attribute {name!r}. {did_you_mean(name, public)}")
        found = getattr(found, name)
    return found


def _module(path: str, name: str, home: Path) -> Any:
    try:
        return import_module(name)
    except Exception as error:
        # A module may raise anything while it is imported; one that it looks for in vain is not the one that we do.
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise ServerError(
                f"{path!r}: there is no module {error.name!r}, neither in {home} nor installed."
            ) from None
        raise ServerError(f"{path!r}: importing {name!r} failed: {type(error).__name__}: {error}") from error


def _taken(callee: Callable[..., Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that it takes by keyword; all of them if it takes any."""
    with suppress(ValueError):
        # A ValueError means that it is written in C and does not tell: it gets everything.
        parameters = inspect.signature(callee).parameters.values()
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
            return {name: value for name, value in args.items() if name in named}
    return dict(args)


def _registered(identifier: str, args: Mapping[str, Any]) -> GymServer:
    gymnasium = _gymnasium()
    try:
        server: GymServer = gymnasium.make(identifier, **args)
    except gymnasium.error.Error as error:
        raise ServerError(f"gymnasium cannot make {identifier!r}: {error}") from error
    except TypeError as error:
        raise ServerError(
            f"gymnasium cannot make {identifier!r} with {', '.join(args) or 'no'} arguments: {error}"
        ) from error
    return server


def _unregistered(identifier: str) -> str | None:
    gymnasium = _gymnasium()
    try:
        gymnasium.spec(identifier)
    except (gymnasium.error.Error, ImportError) as error:
        return f"gymnasium knows no environment {identifier!r}: {error}"
    return None


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise MissingExtra("a gymnasium environment", "rl") from error
    return gymnasium


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
