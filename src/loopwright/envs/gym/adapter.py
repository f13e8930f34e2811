"""The Gymnasium adapter: a run as a `gymnasium.Env` that passes the checkers. Import it late: gymnasium is an extra.

In a batch run every trial is an episode of its own: the regime is drawn anew for each, whatever was done before, so a
step always gives `terminated = True`, and `truncated = True` when the budget is used up with it.
"""

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from loopwright.core.errors import InvalidAction
from loopwright.core.trial import Action, Feedback, Observation
from loopwright.envs.gym.codec import ActionCodec, LiveCodec, ObservationCodec, View
from loopwright.envs.gym.observation import RegimeEncoder, StructuredObservation
from loopwright.envs.live.env import LiveEnv, below
from loopwright.envs.search import TrialEnv
from loopwright.ledger.run import RunStopped

T = TypeVar("T")


def spec_of(**kwargs: Any) -> EnvSpec:
    """What gymnasium is told of a run: the seed of a reset decides nothing, since draws come from the run's own."""
    entry = "loopwright.scenario.make:make" if kwargs else None
    return EnvSpec(
        "Loopwright-v0",
        entry_point=entry,
        nondeterministic=True,
        order_enforce=False,
        disable_env_checker=True,
        kwargs=kwargs,
    )


def _structure_of(env: TrialEnv | LiveEnv) -> StructuredObservation | None:
    """Any environment may bring a structure of its own; else one is made where something is drawn."""
    if isinstance(env, StructuredObservation):
        return env
    return RegimeEncoder(env.draws) if env.draws.values else None


class Driver:
    """Steps a batch environment for callers without an event loop, several trials at a time if asked.

    A failed trial is told as the penalty set for it, or as less than the worst reward seen so far.
    """

    def __init__(self, env: TrialEnv, view: View) -> None:
        self.env = env
        self.actions = ActionCodec(env.space, view)
        self.observations = ObservationCodec(env.metric_names, _structure_of(env), flat=view != "dict")
        self._loop = asyncio.new_event_loop()
        self._worst = min(0.0, env.run.ledger.worst() or 0.0)
        self._flights: list[asyncio.Future[Feedback]] = []
        env.run.when_stopped(self._stop)
        try:
            self._wait(self._open())
            for trials in env.unfinished():
                self._run([env.resume(trials)])
        except BaseException:
            self.close()
            raise

    async def _open(self) -> None:
        self.env.open()

    def _stop(self) -> None:
        for flight in self._flights:
            self._loop.call_soon_threadsafe(flight.cancel)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def step(self, actions: Sequence[Action], note: Mapping[str, Any] | None = None) -> list[Feedback]:
        """Run one trial per slot, all in flight together."""
        self._go_on()
        return self._run([self.env.step(action, note, slot=slot) for slot, action in enumerate(actions)])

    def measure(self, action: Action, regime: Mapping[str, Any], note: Mapping[str, Any]) -> Feedback:
        """One trial under a regime of one's choice, for evaluations."""
        self._go_on()
        return self._run([self.env.step(action, note, fresh=True, under=regime)])[0]

    def _go_on(self) -> None:
        if self._loop.is_closed():
            raise InvalidAction("the environment is closed: make another one")
        if self.env.run.stopping:
            raise RunStopped

    def _run(self, steps: Sequence[Awaitable[Feedback]]) -> list[Feedback]:
        return self._wait(self._fly(steps))

    async def _fly(self, steps: Sequence[Awaitable[Feedback]]) -> list[Feedback]:
        self._flights = [asyncio.ensure_future(step) for step in steps]
        if self.env.run.stopping:  # it came while they were being reserved
            self._stop()
        try:
            return list(await asyncio.gather(*self._flights))
        except asyncio.CancelledError:
            raise RunStopped from None
        finally:
            # One that raised takes the others with it: none may go on when nobody waits for it any more.
            for flight in self._flights:
                flight.cancel()
            await asyncio.gather(*self._flights, return_exceptions=True)
            self._flights = []
            self.env.run.ledger.flush()

    def regime_alone(self, regime: Mapping[str, Any]) -> Any:
        """What a policy of ours sees, in training as in use: the regime, and nothing of what the last trial gave."""
        return self.observations.encode(Observation(dict.fromkeys(self.env.metric_names), regime))

    def told(self, feedback: Feedback) -> float:
        """The number that a learner gets for a trial."""
        if feedback.reward is not None:
            self._worst = min(self._worst, feedback.reward.value)
        return below(self._worst) if feedback.told is None else feedback.told[0]

    def close(self) -> None:
        """End what runs, and let go of everything."""
        if not self._loop.is_closed():
            self.env.run.when_stopped(None)
            self._wait(self.env.close())
            self._loop.close()


class GymnasiumAdapter(gym.Env[Any, Any]):
    """A batch run as an environment.

    `info` has `trial`, `outcome`, `env_params` (the regime that the trial ran under) and `metrics`.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  gymnasium's own declaration

    def __init__(self, env: TrialEnv, *, view: View = "dict") -> None:
        self._driver = Driver(env, view)
        self.inner, self.spec = env, spec_of()
        self.action_space = self._driver.actions.gym_space
        self.observation_space = self._driver.observations.gym_space

    def encode_action(self, values: Action) -> Any:
        """Native values as an action of this environment's space."""
        return self._driver.actions.encode(values)

    def decode_action(self, action: Any) -> dict[str, Any]:
        """An action of this environment's space as native values."""
        return self._driver.actions.decode(action)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The observation that waits. Draws come from the run's seed, so this seed only feeds `np_random`."""
        super().reset(seed=seed, options=options)
        waiting = self.inner.reset()
        return self._driver.observations.encode(waiting), {
            "env_params": dict(waiting.context),
            "trial": self.inner.run.step,
        }

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._answer(self._driver.step([self.decode_action(action)])[0])

    def step_raw(self, values: Action) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """A step with native values: exactly the tunable and the fixed parameters."""
        return self._answer(self._driver.step([self._driver.actions.native(values)])[0])

    def _answer(self, feedback: Feedback) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        seen = self._driver.observations.encode(feedback.observation)
        return seen, self._driver.told(feedback), True, feedback.done, info_of(feedback)

    def close(self) -> None:
        self._driver.close()


def info_of(feedback: Feedback) -> dict[str, Any]:
    """What a step tells beside its numbers."""
    return {
        "trial": feedback.trial,
        "outcome": str(feedback.outcome),
        "env_params": dict(feedback.regime),
        "metrics": {name: value for name, value in feedback.observation.metrics.items() if value is not None},
    }


class VectorAdapter(gym.vector.VectorEnv[Any, Any, Any]):
    """A batch run as a vectorised environment: one trial per slot in flight. Each step ends every episode, and the
    observation that comes with it is already that of the next one (`AutoresetMode.SAME_STEP`).
    """

    def __init__(self, env: TrialEnv, num_envs: int, *, view: View = "flat") -> None:
        if num_envs < 1:
            raise ValueError(f"a vectorised environment needs at least one slot, not {num_envs}")
        self._driver = Driver(env, view)
        self.inner, self.num_envs, self.spec = env, num_envs, spec_of()
        self.metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_action_space = self._driver.actions.gym_space
        self.single_observation_space = self._driver.observations.gym_space
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The observations that wait, one per slot. Draws come from the run's seed, not from this one."""
        super().reset(seed=seed if isinstance(seed, int) else None, options=options)
        infos: dict[str, Any] = {}
        for slot in range(self.num_envs):
            about = {"env_params": dict(self.inner.reset(slot).context), "trial": self.inner.run.step}
            infos = self._add_info(infos, about, slot)
        return self._seen(), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One trial per slot, all in flight together."""
        chosen = [
            self._driver.actions.decode(action) for action in gym.vector.utils.iterate(self.action_space, actions)
        ]
        told = self._driver.step(chosen)
        rewards = np.array([self._driver.told(feedback) for feedback in told], np.float64)
        done = np.array([feedback.done for feedback in told])
        infos: dict[str, Any] = {}
        for slot, feedback in enumerate(told):
            about = info_of(feedback)
            final = {"final_obs": self._driver.observations.encode(feedback.observation), "final_info": dict(about)}
            infos = self._add_info(infos, {**about, **final}, slot)
        return self._seen(), rewards, np.ones(self.num_envs, bool), done, infos

    def _seen(self) -> Any:
        waiting = [self._driver.observations.encode(self.inner.reset(slot)) for slot in range(self.num_envs)]
        empty: Any = create_empty_array(self.single_observation_space, self.num_envs)
        return concatenate(self.single_observation_space, waiting, empty)

    def close_extras(self, **_: Any) -> None:
        self._driver.close()


class LiveAdapter(gym.Env[Any, Any]):
    """A live run as an environment: the server's own spaces and episodes, every step a trial.

    Where something is drawn, each observation has the regime of its episode beside it, as in a batch run.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  gymnasium's own declaration

    def __init__(self, env: LiveEnv, *, view: View = "flat") -> None:
        self.inner, self.spec = env, spec_of()
        self._observations = LiveCodec(env.server.observation_space, _structure_of(env), flat=view != "dict")
        self.observation_space = self._observations.gym_space
        self.action_space = env.server.action_space
        if not self._observations.adds:
            self.step = env.step_now  # type: ignore[method-assign]  # one call less on the hot path

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        seen, info = self.inner.start_episode(seed, options)
        self._observations.begin(info.get("env_params", {}))
        return self._observations.encode(seen), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        seen, reward, terminated, truncated, info = self.inner.step_now(action)
        return self._observations.encode(seen), reward, terminated, truncated, info

    def close(self) -> None:
        self.inner.shut()
