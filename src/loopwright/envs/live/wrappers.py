"""Gymnasium wrappers around a server, where it is created. Requires gymnasium: import it late."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import gymnasium as gym
from gymnasium.wrappers import TimeLimit

from loopwright.core.imports import import_function
from loopwright.envs.live.server import GymServer, ServerError

_STATEFUL = ("NormalizeObservation", "NormalizeReward")


class MaskInfo(gym.Wrapper[Any, Any, Any, Any]):
    """Adds `info["action_mask"]` from the environment's method `action_masks()`, so that it reaches other processes."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, {**info, "action_mask": self._mask()}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, {**info, "action_mask": self._mask()}

    def _mask(self) -> Any:
        return self.env.get_wrapper_attr("action_masks")()


def wrap(
    server: GymServer, wrappers: Sequence[Mapping[str, Any]], max_episode_steps: int | None, directory: Path
) -> GymServer:
    """The server inside these wrappers, the first one innermost, and inside a time limit."""
    if not isinstance(server, gym.Env):
        if wrappers or max_episode_steps is not None:
            raise ServerError(f"wrappers and max_episode_steps need a gymnasium.Env, not a {type(server).__name__}")
        return server
    env: gym.Env[Any, Any] = server
    if env.has_wrapper_attr("action_masks"):
        env = MaskInfo(env)
    for table in wrappers:
        path, arguments = str(table["type"]), {name: value for name, value in table.items() if name != "type"}
        if path.rpartition(":")[2] in _STATEFUL:
            raise ServerError(
                f"wrapper {path!r} learns statistics that would not be saved with the policy; use normalize = true in "
                "[run.agent]"
            )
        try:
            env = import_function(path, directory)(env, **arguments)
        except Exception as error:  # a wrapper may raise anything
            raise ServerError(f"wrapper {path!r}: {error}") from error
    return cast("GymServer", env if max_episode_steps is None else TimeLimit(env, max_episode_steps))
