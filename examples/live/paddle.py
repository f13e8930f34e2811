"""The live environment of `paddle.toml`: a ball falls, and a paddle has to catch it."""

import random
from typing import Any

import gymnasium
import numpy as np

_HEIGHT, _CATCHES = 12.0, 10


class PaddleServer:
    """Ten balls per episode: +1 for each ball caught, −1 for the first one missed, which ends the episode.

    The agent observes the position of the paddle, the offset, height and direction of the ball, and its speed, all
    between −1 and 1. It moves the paddle left, not at all, or right. The speed of the balls is drawn per episode.
    """

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (5,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, paddle_width: float = 0.8, paddle_speed: float = 0.3) -> None:
        self._half, self._step = paddle_width / 2, paddle_speed
        self._random = random.Random()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode with the ball speed of the regime."""
        if seed is not None:
            self._random.seed(seed)
        regime = (options or {}).get("env_params", {})
        self._speed = float(regime.get("ball_speed", 1.0))
        self._paddle, self._caught = 0.0, 0
        self._throw()
        return self._observation(), {"env_params": {"ball_speed": self._speed}}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move the paddle and the ball. There is a reward only when the ball comes down."""
        self._paddle = min(1.0, max(-1.0, self._paddle + self._step * (int(action) - 1)))
        self._x, self._y = self._x + self._dx, self._y - self._speed
        if abs(self._x) > 1.0:
            self._x, self._dx = np.sign(self._x) * 2.0 - self._x, -self._dx
        if self._y > 0:
            return self._observation(), 0.0, False, False, {}
        if abs(self._x - self._paddle) > self._half:
            return self._observation(), -1.0, True, False, {"caught": self._caught}
        self._caught += 1
        self._throw()
        return self._observation(), 1.0, self._caught == _CATCHES, False, {"caught": self._caught}

    def close(self) -> None:
        """Nothing to release."""

    def _throw(self) -> None:
        self._x, self._y = self._random.uniform(-1.0, 1.0), _HEIGHT
        self._dx = self._random.uniform(-0.05, 0.05) * self._speed

    def _observation(self) -> np.ndarray:
        height = 2.0 * max(self._y, 0.0) / _HEIGHT - 1.0
        offset = (self._x - self._paddle) / 2.0
        return np.array([self._paddle, offset, height, self._dx * 10.0, self._speed - 1.5], np.float32).clip(-1.0, 1.0)
