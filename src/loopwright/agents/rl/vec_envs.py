"""Runs as the vectorised environments of Stable-Baselines3. Import it late: SB3 is heavy."""

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from loopwright.agents.rl.library_spaces import flat_actions, flatten_codec
from loopwright.core.errors import LoopwrightError
from loopwright.envs.gym.adapter import Driver, step_info
from loopwright.envs.gym.vector import LiveSlots
from loopwright.envs.live.env import LiveEnv


class RunVecEnv(VecEnv):
    """What the environments of a run have in common: they are not Python objects that SB3 can reach into."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name, None)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise AttributeError(attr_name)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise AttributeError(method_name)

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        del wrapper_class  # the slots have no wrappers
        return [False] * len(list(self._get_indices(indices)))

    @abstractmethod
    def reset(self) -> Any: ...

    def close(self) -> None: ...


class SlotVecEnv(RunVecEnv):
    """A batch run for SB3: one trial per slot in flight. The driver belongs to the caller."""

    def __init__(self, driver: Driver, slots: int) -> None:
        self._driver = driver
        self._actions: list[dict[str, Any]] = []
        super().__init__(slots, driver.observations.gym_space, driver.actions.gym_space)

    def reset(self) -> Any:
        first = [self._driver.env.reset(slot) for slot in range(self.num_envs)]
        return stack([self._driver.encode_for_policy(observation) for observation in first])

    def step_async(self, actions: Any) -> None:
        self._actions = [self._driver.actions.decode(action) for action in actions]

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        feedback = self._driver.step(self._actions)
        rewards = np.array([self._driver.reward(one) for one in feedback], np.float32)
        dones = np.array([one.terminated for one in feedback])
        observations, infos = [], []
        for slot, one in enumerate(feedback):
            info, observation = {**step_info(one), "TimeLimit.truncated": False}, one.observation
            if one.terminated:
                info["terminal_observation"] = self._driver.encode_for_policy(observation)
                observation = self._driver.env.reset(slot)
            observations.append(self._driver.encode_for_policy(observation))
            infos.append(info)
        return stack(observations), rewards, dones, infos


class LiveVecEnv(RunVecEnv):
    """A live run for SB3, one environment or several. Rewards, seeds and observations are those of its DummyVecEnv."""

    def __init__(self, env: LiveEnv) -> None:
        self._slots = LiveSlots(env)
        self._actions = flat_actions(self._slots.action_space, "sb3")
        self._observations = flatten_codec(self._slots.observation_space, "sb3")
        self._next_actions: Any = ()
        self._masks: list[Any] = [None] * len(env.slots)
        self._returns = [0.0] * len(env.slots)
        self._lengths = [0] * len(env.slots)
        self._began_s = time.time()
        action_space = self._slots.action_space if self._actions is None else self._actions.gym_space
        codec = self._observations
        super().__init__(
            len(env.slots), self._slots.observation_space if codec is None else codec.gym_space, action_space
        )

    def reset(self) -> Any:
        observations = self._reset(range(self.num_envs), self._seeds)
        self._reset_seeds()
        return stack(observations)

    def _reset(self, slots: Sequence[int], seeds: Sequence[int | None] | None = None) -> list[Any]:
        observations = []
        for slot, (observation, info) in zip(slots, self._slots.reset(slots, seeds), strict=True):
            self.reset_infos[slot] = info
            self._masks[slot] = info.get("action_mask")
            self._returns[slot], self._lengths[slot] = 0.0, 0
            observations.append(observation if self._observations is None else self._observations.encode(observation))
        return observations

    def step_async(self, actions: Any) -> None:
        self._next_actions = actions if self._actions is None else [self._actions.decode(action) for action in actions]

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        steps = self._slots.step(self._next_actions)
        dones = np.zeros(self.num_envs, bool)
        observations: list[Any] = []
        infos: list[dict[str, Any]] = []
        done_slots: list[int] = []
        for slot, (observation, reward, terminated, truncated, info) in enumerate(steps):
            if self._observations is not None:
                observation = self._observations.encode(observation)
            self._returns[slot] += reward
            self._lengths[slot] += 1
            info["TimeLimit.truncated"] = truncated and not terminated
            if terminated or truncated:
                dones[slot] = True
                seconds = round(time.time() - self._began_s, 6)
                info["episode"] = {"r": self._returns[slot], "l": self._lengths[slot], "t": seconds}
                info["terminal_observation"] = observation
                done_slots.append(slot)
            elif "action_mask" in info:
                self._masks[slot] = info["action_mask"]
            observations.append(observation)
            infos.append(info)
        if done_slots and self._slots.can_continue:  # otherwise nothing would be done in the next episode
            for slot, observation in zip(done_slots, self._reset(done_slots), strict=True):
                observations[slot] = observation
        rewards = np.array([step[1] for step in steps], np.float32)
        return stack(observations), rewards, dones, infos

    def has_attr(self, attr_name: str) -> bool:
        return attr_name == "action_masks" or super().has_attr(attr_name)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        if method_name != "action_masks":
            raise AttributeError(method_name)
        return [np.asarray(self._mask(slot), bool).ravel() for slot in self._get_indices(indices)]

    def _mask(self, slot: int) -> Any:
        """Which actions are allowed now: as the last `info` says, or the server's method."""
        if self._masks[slot] is not None:
            return self._masks[slot]
        server: Any = self._slots.env.slots[slot].server
        find = getattr(server, "get_wrapper_attr", None)
        try:
            return (find("action_masks") if find else server.action_masks)()
        except AttributeError:
            raise LoopwrightError(
                "the environment masks no actions: it has neither a method action_masks() nor info['action_mask']; "
                "use ppo"
            ) from None


def stack(observations: Sequence[Any]) -> Any:
    """A batch of observations."""
    if isinstance(observations[0], dict):
        return {name: np.stack([one[name] for one in observations]) for name in observations[0]}
    return np.stack(observations)
