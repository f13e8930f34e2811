"""A server under regimes: drawn arguments reach its constructor, and `reset` says which ones took effect (R09).

An argument that the constructor takes is applied by building the server again when its value changes. Any other one is
applied by the server itself, which acknowledges it: `reset` returns `info["env_params"]` with the value in use.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from loopwright.core.errors import did_you_mean
from loopwright.envs.live.server import GYMNASIUM, GymServer, ServerError, keyword_names, load_factory, make_server


@dataclass(frozen=True)
class ServerTarget:
    """What a server is created from."""

    path: str
    """`module:Class` or `gymnasium:ID`."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """The constructor's fixed arguments."""
    regime: Mapping[str, Any] = field(default_factory=dict)
    """The drawn arguments that the constructor takes, each with the value that the first server is built with."""
    directory: Path = Path()
    wrappers: Sequence[Mapping[str, Any]] = ()
    """Gymnasium wrappers around it, each with its `type` and its arguments."""
    max_episode_steps: int | None = None

    def make(self, regime: Mapping[str, Any] | None = None) -> GymServer:
        """A server with these drawn arguments."""
        server = make_server(self.path, {**self.args, **self.regime, **(regime or {})}, self.directory)
        from loopwright.envs.live.wrappers import wrap  # requires gymnasium

        return wrap(server, self.wrappers, self.max_episode_steps, self.directory)


class RegimeServer:
    """A server that is built again whenever a drawn argument of its constructor changes.

    The spaces must stay the same under every regime: one policy acts under all of them. `more` names arguments of the
    constructor that a regime may set as well.
    """

    def __init__(self, target: ServerTarget, more: Collection[str] = ()) -> None:
        self._target, self._built_with = target, dict(target.regime)
        self._names = {*target.regime, *more}
        self._server: GymServer | None = target.make()
        self.observation_space, self.action_space = self._server.observation_space, self._server.action_space
        self.metadata: dict[str, Any] = dict(getattr(self._server, "metadata", None) or {})
        self.render_mode = target.args.get("render_mode")
        self.step = self._server.step
        """The step of the current server, without a detour."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, in a new server if the regime asks for other arguments or `discard` was called."""
        regime: Mapping[str, Any] = (options or {}).get("env_params", {})
        applied = {name: value for name, value in regime.items() if name in self._names}
        arguments = {**self._target.regime, **applied}
        if self._server is None or arguments != self._built_with:
            self.discard()
            self._server = self._target.make(arguments)
            self._built_with, self.step = arguments, self._server.step
            self._check_spaces(self._server)
        result: Any = self._server.reset(seed=seed, options=options)
        if not applied:
            return result  # type: ignore[no-any-return]
        try:
            observation, info = result
            return observation, {**info, "env_params": {**info.get("env_params", {}), **applied}}
        except (TypeError, ValueError, AttributeError):
            return result  # type: ignore[no-any-return]  # malformed: the environment that called says how

    def render(self) -> Any:
        """An image of the current state. GymServer does not ask for this method, so a server may not have it."""
        return cast("Any", self._server).render()

    def _check_spaces(self, server: GymServer) -> None:
        for name in ("observation_space", "action_space"):
            before, after = getattr(self, name), getattr(server, name)
            if before != after:
                raise ServerError(
                    f"under {self._built_with} the {name} is {after}, but {before} before. Draw arguments that leave "
                    "the spaces as they are, or pad them to one size."
                )

    def discard(self) -> None:
        """Close the current server, whatever state it is in; the next reset builds another one."""
        server, self._server = self._server, None
        if server is not None:
            with suppress(Exception):
                server.close()

    def close(self) -> None:
        """Close the current server."""
        server, self._server = self._server, None
        if server is not None:
            server.close()


def unacknowledged(regime: Mapping[str, Any], info: Mapping[str, Any]) -> list[str]:
    """The drawn arguments that a reset did not acknowledge with their values."""
    applied = info.get("env_params")
    if not isinstance(applied, Mapping):
        return list(regime)
    return [name for name, value in regime.items() if name not in applied or applied[name] != value]


def refusal(names: Collection[str]) -> str:
    """Why a regime with these arguments is refused, and the fix."""
    arguments = ", ".join(map(repr, names))
    return (
        f"the environment does not apply {arguments}: its constructor takes no such argument, and `reset` does not "
        'acknowledge it. Accept it in the constructor, or apply options["env_params"] in `reset` and return it in '
        'info["env_params"].'
    )


def constructor_args(path: str, directory: Path) -> list[str] | None:
    """The keyword arguments of a server's constructor, or None if it takes any (`**kwargs`) or has no signature."""
    try:
        names = keyword_names(load_factory(path, directory))
    except Exception:  # noqa: BLE001  nothing to call, which is reported by check_server_class
        return None
    return [*names, *_MAKE_ARGS] if names is not None and path.startswith(GYMNASIUM) else names


_MAKE_ARGS = ("max_episode_steps", "disable_env_checker")
"""What `gymnasium.make` itself takes."""


def misspelled(name: str, accepted: Collection[str]) -> str | None:
    """Why a fixed argument is refused: the constructor takes none of this name, but one with a similar name."""
    hint = did_you_mean(name, list(accepted))
    return f"the constructor takes no argument {name!r}. {hint}" if "Did you mean" in hint else None
