"""Servers: what steps a live environment, and what it may return from a step. Every `gymnasium.Env` is a server."""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat, cast

from loopwright.core.errors import LoopwrightError, MissingExtra, did_you_mean
from loopwright.core.imports import look_first_in
from loopwright.core.outcome import Outcome

if TYPE_CHECKING:
    from gymnasium import Space

GYMNASIUM = "gymnasium:"
"""Prefix of an environment in Gymnasium's registry."""
_METHODS = ("reset", "step", "close")
_SPACES = ("observation_space", "action_space")
_STEP_FIELDS = ("observation", "reward", "terminated", "truncated", "info")
_MAX_REPR = 80


class ServerLost(LoopwrightError, ConnectionError):
    """The server died, hangs, or violates the protocol, and its episode is lost.

    `outcome` is that of the step in progress. With `restarts`, the next `reset()` reconnects or starts a new process,
    so that the episode is all that is lost.
    """

    def __init__(self, message: str, *, outcome: Outcome = Outcome.LOST, restarts: bool = False) -> None:
        super().__init__(message)
        self.outcome, self.restarts = outcome, restarts


class ServerError(LoopwrightError, ValueError):
    """The server responds, but with something unusable; the message names the field."""


class GymServer(Protocol):
    """Steps a live environment. A protocol: have these members, inherit nothing.

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
        """The space of observations."""

    @property
    def action_space(self) -> "Space[Any]":
        """The space of actions."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode: its first observation, and info."""

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """One step: observation, reward, terminated, truncated, info."""

    def close(self) -> None:
        """Release everything."""


def make_server(target: str | object, args: Mapping[str, Any], directory: Path) -> GymServer:
    """The server of a target: an object as it is, a class or factory called, `gymnasium:ID` from Gymnasium's registry.

    A path (`module:Class` or `module.Class`) is imported from `directory` first. A class or factory gets those of
    `args` that it accepts; Gymnasium gets all of them.
    """
    if isinstance(target, str) and target.startswith(GYMNASIUM):
        identifier = target.removeprefix(GYMNASIUM)
        if ":" in identifier:  # gymnasium imports the module that registers it
            look_first_in(directory)
        return _make_registered(identifier, args)
    name = target if isinstance(target, str) else getattr(target, "__qualname__", type(target).__name__)
    server: Any = resolve(target, directory) if isinstance(target, str) else target
    if isinstance(server, type) or (callable(server) and not hasattr(server, "step")):
        names = keyword_names(server)
        try:
            server = server(**{key: value for key, value in args.items() if names is None or key in names})
        except LoopwrightError:
            raise
        except (Exception, SystemExit) as error:
            raise ServerError(f"cannot create {name!r}: {type(error).__name__}: {error}") from error
    if missing := [member for member in (*_SPACES, *_METHODS) if not hasattr(server, member)]:
        raise ServerError(f"{name!r} is not a GymServer: it has no {', '.join(missing)}. A gymnasium.Env has them all.")
    return cast("GymServer", server)


def check_server_class(path: str, directory: Path) -> str | None:
    """Why no server can be created from this path, as far as that shows without creating it."""
    try:
        if path.startswith(GYMNASIUM):
            _, identifier = _gymnasium(), path.removeprefix(GYMNASIUM)
            try:
                load_factory(path, directory)
            except Exception as error:  # noqa: BLE001  a module may raise anything
                # Packages other than gymnasium register their environments when they are imported.
                named = ":" in identifier or isinstance(error, ImportError)
                hint = "" if named else f" If a package registers it, name that too: 'gymnasium:package:{identifier}'."
                return f"gymnasium has no environment {identifier!r}: {error}{hint}"
            return None
        target = resolve(path, directory)
    except LoopwrightError as error:
        return str(error)
    if not callable(target):
        return f"{path!r} is of type {type(target).__name__}. Name a class, or a function that returns a server."
    # Only a class shows its methods before it is called; its constructor usually sets the spaces.
    missing = [name for name in _METHODS if isinstance(target, type) and not callable(getattr(target, name, None))]
    if missing:
        return f"{path!r} is not a GymServer: it has no method {', '.join(missing)}. A gymnasium.Env has them all."
    return None


def resolve(path: str, directory: Path) -> Any:
    """The class or factory at `module:Class` or `module.Class`. Raises ServerError."""
    module_name, colon, attribute = path.partition(":")
    if not colon:
        module_name, _, attribute = path.rpartition(".")
    if not module_name or not attribute:
        raise ServerError(f"{path!r} has no module part. Write 'module:Class' or 'module.Class'.")
    look_first_in(directory)
    try:
        value: Any = import_module(module_name)
    except Exception as error:
        # A user's module may raise anything, including that another module is missing.
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ServerError(
                f"{path!r}: there is no module {error.name!r}, neither in {directory} nor installed."
            ) from None
        raise ServerError(f"{path!r}: importing {module_name!r} failed: {type(error).__name__}: {error}") from error
    for name in attribute.split("."):
        if not hasattr(value, name):
            public = [other for other in getattr(value, "__dict__", {}) if not other.startswith("_")]
            raise ServerError(f"{path!r}: {module_name!r} has no attribute {name!r}. {did_you_mean(name, public)}")
        value = getattr(value, name)
    return value


def keyword_names(factory: Any) -> list[str] | None:
    """What a callable accepts by keyword; None if that is anything (`**kwargs`), or if it has no signature."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # it is written in C
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def load_factory(path: str, directory: Path) -> Any:
    """What is called to create the server of a path: the class, or the entry point of a registered environment."""
    if not path.startswith(GYMNASIUM):
        return resolve(path, directory)
    gymnasium = _gymnasium()
    look_first_in(directory)
    module, _, name = path.removeprefix(GYMNASIUM).rpartition(":")  # `module:ID`, as gymnasium.make accepts it
    if module:
        import_module(module)
    entry_point = gymnasium.spec(name).entry_point
    return entry_point if callable(entry_point) else gymnasium.envs.registration.load_env_creator(entry_point)


def _make_registered(identifier: str, args: Mapping[str, Any]) -> GymServer:
    gymnasium = _gymnasium()
    try:
        server: GymServer = gymnasium.make(identifier, **args)
    except gymnasium.error.Error as error:
        raise ServerError(f"gymnasium cannot make {identifier!r}: {error}") from error
    except TypeError as error:
        arguments = f"the arguments {', '.join(args)}" if args else "no arguments"
        raise ServerError(f"gymnasium cannot make {identifier!r} with {arguments}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ServerError(f"gymnasium cannot make {identifier!r}: {type(error).__name__}: {error}") from error
    return server


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise MissingExtra("a gymnasium environment", "rl") from error
    return gymnasium


# The return value of a step


def read_reward(reward: Any) -> float:
    """A reward as a float. Any real number is accepted, but neither text nor true or false."""
    # numpy may return a number as an array without dimensions.
    number = reward[()] if getattr(reward, "shape", None) == () else reward
    if type(number) is not bool and isinstance(number, Real):
        with suppress(OverflowError):
            return float(number)
    raise ServerError(f"reward: expected a number, got {short_repr(reward)}")


def read_flag(field: str, value: Any) -> bool:
    """`terminated` or `truncated`: a bool of Python or numpy."""
    if type(value) is bool or (getattr(value, "shape", None) == () and value.dtype.name == "bool"):
        return bool(value)
    raise ServerError(f"{field}: expected true or false, got {short_repr(value)}")


def step_problem(result: Any, error: Exception) -> str:
    """What is wrong with a step's return value, whose evaluation raised this error; the field's name first."""
    if isinstance(error, ServerError):
        return str(error)
    with suppress(TypeError, LookupError):
        if len(result) == len(_STEP_FIELDS) and not isinstance(result[-1], dict):
            return f"info: expected a dict, got {short_repr(result[-1])}"
        if isinstance(result, tuple | list) and len(result) != len(_STEP_FIELDS):
            # Without the values, which differ in every step: equal failures have equal reasons.
            return f"'step' returned {len(result)} values, expected {', '.join(_STEP_FIELDS)}"
    return f"'step' returned {short_repr(result)}, expected ({', '.join(_STEP_FIELDS)})"


def short_repr(value: Any) -> str:
    """The repr of a value, cut to fit into a message."""
    text = repr(value)
    return text if len(text) <= _MAX_REPR else f"{text[: _MAX_REPR - 3]}…"
