"""A run as a vectorised environment: batch runs with several trials in flight, live runs with several servers.

An episode that ends is followed by the next one in the same step (`AutoresetMode.SAME_STEP`). Requires gymnasium.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from loopwright.envs.gym.adapter import Driver, env_spec, step_info, structure_of
from loopwright.envs.gym.codec import LiveObservationCodec, View
from loopwright.envs.live.env import LiveEnv
from loopwright.envs.search import SearchEnv


class _RunVectorEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """What the vectorised environments of batch and live runs have in common."""

    def __init__(self, num_envs: int, observation_space: "gym.Space[Any]", action_space: "gym.Space[Any]") -> None:
        self.num_envs, self.spec = num_envs, env_spec()
        self.metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_action_space, self.single_observation_space = action_space, observation_space
        self.action_space = batch_space(action_space, num_envs)
        self.observation_space = batch_space(observation_space, num_envs)

    def _batch(self, observations: Sequence[Any]) -> Any:
        empty: Any = create_empty_array(self.single_observation_space, self.num_envs)
        return concatenate(self.single_observation_space, observations, empty)


class VectorAdapter(_RunVectorEnv):
    """A batch run as a vectorised environment: one trial per slot in flight."""

    def __init__(self, env: SearchEnv, num_envs: int, *, view: View = "flat") -> None:
        if num_envs < 1:
            raise ValueError(f"a vectorised environment needs at least one slot, not {num_envs}")
        self.inner, self._driver = env, Driver(env, view)
        self._encode = self._driver.observations.encode
        super().__init__(num_envs, self._driver.observations.gym_space, self._driver.actions.gym_space)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The pending observations, one per slot. Draws come from the run's seed, not from this one."""
        super().reset(seed=seed if isinstance(seed, int) else None, options=options)
        infos: dict[str, Any] = {}
        for slot in range(self.num_envs):
            info = {"env_params": dict(self.inner.reset(slot).context), "trial": self.inner.book.step}
            infos = self._add_info(infos, info, slot)
        return self._batch([self._encode(self.inner.reset(slot)) for slot in range(self.num_envs)]), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One trial per slot, all in flight together."""
        decode = self._driver.actions.decode
        feedback = self._driver.step([decode(a) for a in iterate(self.action_space, actions)])
        rewards = np.array([self._driver.reward(one) for one in feedback], np.float64)
        terminated = np.array([one.terminated for one in feedback])
        truncated = np.array([one.done for one in feedback])
        observations, infos = [self._encode(one.observation) for one in feedback], dict[str, Any]()
        for slot, one in enumerate(feedback):
            info = step_info(one)
            if one.terminated or one.done:
                info |= {"final_obs": observations[slot], "final_info": dict(info)}
                observations[slot] = self._encode(self.inner.reset(slot))
            infos = self._add_info(infos, info, slot)
        return self._batch(observations), rewards, terminated, truncated, infos

    def close_extras(self, **_: Any) -> None:
        self._driver.close()


class LiveSlots:
    """The slots of a live run, stepped together; an episode that ends is followed by the next one.

    Its observations include the regime of the episode, as those of `LiveAdapter` do.
    """

    def __init__(self, env: LiveEnv, view: View = "flat") -> None:
        self.env = env
        space, structure = env.server.observation_space, structure_of(env)
        self._codecs = [LiveObservationCodec(space, structure, flat=view != "dict") for _ in env.slots]
        self.observation_space = self._codecs[0].gym_space
        self.action_space = env.server.action_space

    def reset(
        self,
        slots: Sequence[int],
        seeds: Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> list[tuple[Any, dict[str, Any]]]:
        """Begin an episode in each of these slots; `options` are passed to the servers."""
        episodes = []
        started = self.env.start_episodes(slots, seeds or [None] * len(slots), options)
        for slot, (observation, info) in zip(slots, started, strict=True):
            codec = self._codecs[slot]
            codec.set_regime(info.get("env_params", {}))
            episodes.append((codec.encode(observation), info))
        return episodes

    def step(self, actions: Any) -> list[tuple[Any, float, bool, bool, dict[str, Any]]]:
        """One step of every slot. Observations are those of the step, also if it ends an episode."""
        steps = self.env.step_slots(actions)
        if not self._codecs[0].adds_context:
            return steps
        return [(codec.encode(step[0]), *step[1:]) for codec, step in zip(self._codecs, steps, strict=True)]

    @property
    def can_continue(self) -> bool:
        """Whether another round of steps is within the budget."""
        return self.env.book.has_budget(len(self.env.slots))


class LiveVectorAdapter(_RunVectorEnv):
    """A live run with several servers as a vectorised environment; every step of every server is a trial."""

    def __init__(self, env: LiveEnv, *, view: View = "flat") -> None:
        self.inner, self._slots = env, LiveSlots(env, view)
        super().__init__(len(env.slots), self._slots.observation_space, self._slots.action_space)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every slot; a single seed is counted up, `options` are passed to every server."""
        super().reset(seed=seed if isinstance(seed, int) else None, options=options)
        seeds = [seed + n for n in range(self.num_envs)] if isinstance(seed, int) else seed or [None] * self.num_envs
        infos: dict[str, Any] = {}
        episodes = self._slots.reset(range(self.num_envs), seeds, options)
        for slot, (_, info) in enumerate(episodes):
            infos = self._add_info(infos, info, slot)
        return self._batch([observation for observation, _ in episodes]), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One step of every slot."""
        steps = self._slots.step(list(iterate(self.action_space, actions)))
        observations, infos = [step[0] for step in steps], dict[str, Any]()
        done_slots = [slot for slot, step in enumerate(steps) if step[2] or step[3]]
        next_episodes = dict(zip(done_slots, self._slots.reset(done_slots), strict=True))
        for slot, (final_observation, *_, info) in enumerate(steps):
            if slot in next_episodes:
                final = {"final_obs": final_observation, "final_info": info}
                observations[slot], info = next_episodes[slot][0], {**next_episodes[slot][1], **final}
            infos = self._add_info(infos, info, slot)
        rewards = np.array([step[1] for step in steps], np.float64)
        ends = (np.array([step[place] for step in steps], bool) for place in (2, 3))
        return self._batch(observations), rewards, *ends, infos

    def close_extras(self, **_: Any) -> None:
        self.inner.close()
