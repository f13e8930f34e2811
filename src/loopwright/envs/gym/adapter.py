"""A run as a `gymnasium.Env` that passes the environment checkers. Requires gymnasium (extra `rl`): import it late.

In a batch run an episode has as many trials as `[run.episode] steps` says, by default one, all under one regime. Its
last step returns `terminated = True`; a step returns `truncated = True` once the budget is used up.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from loopwright.core.errors import InvalidAction
from loopwright.core.trial import Action, Feedback, Observation
from loopwright.envs.gym.codec import ActionCodec, LiveObservationCodec, ObservationCodec, View
from loopwright.envs.gym.observation import RegimeEncoder, StructuredObservation
from loopwright.envs.live.env import LiveEnv, failure_reward
from loopwright.envs.search import SearchEnv
from loopwright.ledger.trial_book import RunStopped


def env_spec(**kwargs: Any) -> EnvSpec:
    """The Gymnasium spec of a run. Nondeterministic: draws depend on the run's seed, not on the seed of a reset."""
    return EnvSpec(
        "Loopwright-v0",
        entry_point="loopwright.scenario.make:make" if kwargs else None,
        nondeterministic=True,
        order_enforce=False,
        disable_env_checker=True,
        kwargs=kwargs,
    )


def structure_of(env: SearchEnv | LiveEnv) -> StructuredObservation | None:
    """The environment itself if it describes its observations, else the drawn parameters, if there are any."""
    if isinstance(env, StructuredObservation):
        return env
    return RegimeEncoder(env.draws) if env.draws.values else None


class Driver:
    """Steps a batch environment for callers without an event loop, several trials at a time on request."""

    def __init__(self, env: SearchEnv, view: View) -> None:
        self.env = env
        self.actions = ActionCodec(env.space, view)
        self.observations = ObservationCodec(env.metric_names, structure_of(env), flat=view != "dict")
        self._loop = asyncio.new_event_loop()
        self._worst = min(0.0, env.book.ledger.worst() or 0.0)
        self._in_flight: list[asyncio.Future[Feedback]] = []
        env.book.when_stopped(self._cancel)
        try:
            for trials in env.unfinished():
                self._run([env.resume(trials)])
        except BaseException:
            self.close()
            raise

    def _cancel(self) -> bool:
        for trial in self._in_flight:
            self._loop.call_soon_threadsafe(trial.cancel)
        return bool(self._in_flight)

    def step(self, actions: Sequence[Action], note: Mapping[str, Any] | None = None) -> list[Feedback]:
        """Run one trial per slot, all in flight together."""
        self._check_open()
        return self._run([self.env.step(action, note, slot=slot) for slot, action in enumerate(actions)])

    def measure(self, action: Action, regime: Mapping[str, Any], note: Mapping[str, Any]) -> Feedback:
        """Run one trial under a given regime, for evaluations."""
        self._check_open()
        return self._run([self.env.step(action, note, fresh=True, under=regime)])[0]

    def _check_open(self) -> None:
        if self._loop.is_closed():
            raise InvalidAction("the environment is closed: make another one")
        if self.env.book.stopping:
            raise RunStopped

    def _run(self, steps: Sequence[Awaitable[Feedback]]) -> list[Feedback]:
        return self._loop.run_until_complete(self._gather(steps))

    async def _gather(self, steps: Sequence[Awaitable[Feedback]]) -> list[Feedback]:
        self._in_flight = [asyncio.ensure_future(step) for step in steps]
        if self.env.book.stopping:  # stopped while the trials were being reserved
            self._cancel()
        try:
            return list(await asyncio.gather(*self._in_flight))
        except asyncio.CancelledError:
            raise RunStopped from None
        finally:
            # If one raised, nobody waits for the others any more: cancel them.
            for trial in self._in_flight:
                trial.cancel()
            await asyncio.gather(*self._in_flight, return_exceptions=True)
            self._in_flight = []
            self.env.book.ledger.flush()

    def encode_for_policy(self, observation: Observation) -> Any:
        """What our own policies observe, in training and in use: the regime and, in an episode of several trials, the
        metrics of the last one.
        """
        if self.env.rules.episode_steps == 1:
            observation = replace(observation, metrics=dict.fromkeys(self.env.metric_names))
        return self.observations.encode(observation)

    def reward(self, feedback: Feedback) -> float:
        """The learner's number for a trial. A failed trial gets its penalty, or less than the worst reward so far."""
        if feedback.reward is not None:
            self._worst = min(self._worst, feedback.reward.value)
        return failure_reward(self._worst) if feedback.values is None else feedback.values[0]

    def close(self) -> None:
        """Cancel running trials and close the environment. May be called again."""
        if not self._loop.is_closed():
            self.env.book.when_stopped(None)
            self._loop.run_until_complete(self.env.workload.close())
            self._loop.close()


class GymnasiumAdapter(gym.Env[Any, Any]):
    """A batch run as an environment.

    `info` has `trial`, `outcome`, `env_params` (the regime that the trial ran under) and `metrics`.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  as gymnasium declares it

    def __init__(self, env: SearchEnv, *, view: View = "dict") -> None:
        self._driver = Driver(env, view)
        self.inner, self.spec = env, env_spec()
        self.action_space = self._driver.actions.gym_space
        self.observation_space = self._driver.observations.gym_space

    def encode_action(self, values: Action) -> Any:
        """Native values as an element of the action space."""
        return self._driver.actions.encode(values)

    def decode_action(self, action: Any) -> dict[str, Any]:
        """An element of the action space as native values."""
        return self._driver.actions.decode(action)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The pending observation. Draws come from the run's seed; this seed only feeds `np_random`."""
        super().reset(seed=seed, options=options)
        observation = self.inner.reset()
        info = {"env_params": dict(observation.context), "trial": self.inner.book.step}
        return self._driver.observations.encode(observation), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._step(self.decode_action(action))

    def step_raw(self, values: Action) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """A step with native values: exactly the tunable and the fixed parameters."""
        return self._step(self._driver.actions.native(values))

    def _step(self, action: Action) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        (feedback,) = self._driver.step([action])
        observation = self._driver.observations.encode(feedback.observation)
        return observation, self._driver.reward(feedback), feedback.terminated, feedback.done, step_info(feedback)

    def close(self) -> None:
        self._driver.close()


def step_info(feedback: Feedback) -> dict[str, Any]:
    """The `info` of a step."""
    return {
        "trial": feedback.trial,
        "outcome": str(feedback.outcome),
        "env_params": dict(feedback.regime),
        "metrics": {name: value for name, value in feedback.observation.metrics.items() if value is not None},
    }


class LiveAdapter(gym.Env[Any, Any]):
    """A live run as an environment: the server's own spaces and episodes, every step a trial.

    With env_params, each observation includes the regime of its episode, as in a batch run.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  as gymnasium declares it

    def __init__(self, env: LiveEnv, *, view: View = "flat") -> None:
        self.inner, self.spec = env, env_spec()
        self._observations = LiveObservationCodec(env.server.observation_space, structure_of(env), flat=view != "dict")
        self.observation_space = self._observations.gym_space
        self.action_space = env.server.action_space
        if not self._observations.adds_context:
            self.step = env.step_now  # type: ignore[method-assign]  # one call less on the hot path

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        observation, info = self.inner.start_episode(seed, options)
        self._observations.set_regime(info.get("env_params", {}))
        return self._observations.encode(observation), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.inner.step_now(action)
        return self._observations.encode(observation), reward, terminated, truncated, info

    def close(self) -> None:
        self.inner.close()
