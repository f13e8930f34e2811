"""Evaluation of a live policy during training: whole episodes on a separate server, beside those of a random policy.

Its steps are not trials: they are not part of the budget, and training does not learn from them. Each evaluation uses
the same seeds and regimes, so that checkpoints are compared under the same conditions. Requires gymnasium.
"""

import base64
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, cast

import numpy as np
from gymnasium import spaces

from loopwright.agents.rl.learner import EvaluationConfig, PolicyLearner
from loopwright.agents.rl.library_spaces import flat_actions, flatten_codec
from loopwright.agents.rl.policy import keep_best
from loopwright.agents.rl.video import VideoRecorder
from loopwright.core.confidence import interval
from loopwright.core.errors import LoopwrightError
from loopwright.envs.gym.adapter import structure_of
from loopwright.envs.gym.codec import LiveObservationCodec
from loopwright.envs.live.env import LiveEnv
from loopwright.envs.live.server import GymServer
from loopwright.ledger.steps import Step, Steps

log = logging.getLogger(__name__)
_MAX_STEPS = 100_000
"""An episode that has not ended by then is left out."""
_FIRST_SEED = 1_000_000
"""Seeds of evaluation episodes: far from those of training, which begin with the run's seed."""
Choose = Callable[[Any, Any, Any], tuple[Any, Any]]
"""The action for an observation, the policy's state (None at the start of an episode) and a mask; and the new state."""


@dataclass
class EvaluationEpisodes:
    """The episodes of one evaluation."""

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    recorder: VideoRecorder | None = None
    """Has the frames of the first one, if the environment draws itself."""


class LiveEvaluator:
    """Evaluates a policy every `every` steps, and keeps the best one. One that fails does not end the training."""

    def __init__(self, env: LiveEnv, config: EvaluationConfig, card: Mapping[str, Any], seed: int) -> None:
        if env.make_server is None:
            raise LoopwrightError(
                "evaluate needs a second environment, but the server is an object: name its class in [run.live] "
                "env_class, or remove evaluate"
            )
        self._env, self._config, self._card, self._seed = env, config, card, seed
        self._ledger = env.book.ledger
        self._steps = Steps(self._ledger)
        self._server: GymServer | None = None
        first = env.server
        self._codec = LiveObservationCodec(first.observation_space, structure_of(env))
        self._flatten = flatten_codec(self._codec.gym_space, card["library"])
        self._actions = flat_actions(first.action_space, card["library"])
        self._due = env.book.step + config.every
        self._records = True

    def evaluate_if_due(self, learner: PolicyLearner) -> None:
        """Evaluate after every `every` steps of training."""
        if self._env.book.step >= self._due:
            self._due = self._env.book.step + self._config.every
            self.evaluate(learner)

    def evaluate(self, learner: PolicyLearner) -> None:
        """Evaluate the policy as it is now; save it as the best one if none had a higher mean return."""
        name = f"baseline {self._seed}"
        if self._ledger.state(name) is None:
            random = self._run(self._random)
            if random is not None:
                self._ledger.set_state(name, random.returns)
        episodes = self._run(
            lambda *now: learner.choose(*now, deterministic=self._config.deterministic), records=self._records
        )
        if episodes is None or not episodes.returns:
            return
        mean, low, high = interval(episodes.returns, "evaluation")
        number = self._env.book.step
        numbers: dict[str, Any] = {
            "return": mean,
            "return_low": low,
            "return_high": high,
            "length": fmean(episodes.lengths),
            "seed": self._seed,
            "returns": episodes.returns,
        }
        self._env.flush()
        step = Step(number, time.time(), numbers)
        self._steps.add("eval", step)
        self._env.book.observers.notify("after_step", "eval", step)
        learner.log_numbers(number, {"eval/return": mean, "eval/length": numbers["length"]})
        best = self._ledger.state(f"best {self._seed}")
        if best is None or mean > best["return"]:
            keep_best(learner, self._card)
            self._ledger.set_state(f"best {self._seed}", {"step": number, "return": mean})
        if episodes.recorder is not None:
            self._store_video(episodes, number, mean)

    def _store_video(self, episodes: EvaluationEpisodes, step: int, mean: float) -> None:
        """Keep the first episode as that of the last policy and, if none was better, of the best one."""
        assert episodes.recorder is not None  # noqa: S101  the caller checks
        image = base64.b64encode(episodes.recorder.encode()).decode()
        video = {"step": step, "seed": self._seed, "mean": mean, "return": episodes.returns[0], "png": image}
        self._ledger.set_state("video last", video)
        best = self._ledger.state("video best")
        if best is None or mean > best["mean"]:
            self._ledger.set_state("video best", video)

    def close(self) -> None:
        """Close the server."""
        if self._server is not None:
            with suppress(Exception):
                self._server.close()
            self._server = None

    def _random(self, _observation: Any, _state: Any, mask: Any) -> tuple[Any, Any]:
        """Any action that is not masked."""
        space: spaces.Space[Any] = self._env.server.action_space if self._actions is None else self._actions.gym_space
        if mask is None:
            return space.sample(), None
        masks: Any = np.asarray(mask, np.int8)
        if isinstance(space, spaces.MultiDiscrete):  # one mask after another
            masks = tuple(np.split(masks, np.cumsum(space.nvec)[:-1]))
        return space.sample(mask=masks), None

    def _run(self, choose: Choose, *, records: bool = False) -> EvaluationEpisodes | None:
        """Whole episodes; None if the environment failed, which is logged."""
        try:
            assert self._env.make_server is not None  # noqa: S101  checked above
            self._server = self._server or self._env.make_server()
            episodes = EvaluationEpisodes()
            if records and getattr(self._server, "render_mode", None) == "rgb_array":
                metadata = getattr(self._server, "metadata", None) or {}
                episodes.recorder = VideoRecorder(float(metadata.get("render_fps") or 30))
            for n in range(self._config.episodes):
                self._run_episode(choose, n, episodes)
            return episodes
        except Exception as error:  # noqa: BLE001  a user's server may raise anything
            log.warning("evaluation skipped: %s: %s", type(error).__name__, error)
            self.close()
            return None

    def _record(self, episodes: EvaluationEpisodes) -> None:
        """Add a frame to the video. An environment that cannot draw itself is evaluated all the same."""
        if episodes.recorder is None:
            return
        try:
            episodes.recorder.record(cast("Any", self._server).render)
        except Exception as error:  # noqa: BLE001  a user's server may raise anything
            log.warning("no video of the evaluation: %s: %s", type(error).__name__, error)
            episodes.recorder, self._records = None, False

    def _run_episode(self, choose: Choose, n: int, episodes: EvaluationEpisodes) -> None:
        server = self._server
        assert server is not None  # noqa: S101
        regime = self._env.draws.sample(n + 1) if self._env.draws.values else {}
        options = {"env_params": dict(regime)} if regime else None
        observation, info = server.reset(seed=_FIRST_SEED + n, options=options)
        self._codec.set_regime(regime)
        total, state = 0.0, None
        if n == 0:
            self._record(episodes)
        for length in range(1, _MAX_STEPS + 1):
            encoded = self._codec.encode(observation)
            if self._flatten is not None:
                encoded = self._flatten.encode(encoded)
            action, state = choose(encoded, state, info.get("action_mask"))
            native = action if self._actions is None else self._actions.decode(action)
            observation, reward, terminated, truncated, info = server.step(native)
            total += float(reward)
            if n == 0:
                self._record(episodes)
            if terminated or truncated:
                episodes.returns.append(total)
                episodes.lengths.append(length)
                return
