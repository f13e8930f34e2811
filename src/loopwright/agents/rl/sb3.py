"""Stable-Baselines3 as a learner: PPO, A2C, DQN and SAC. Import it late: torch and SB3 are extras."""

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import stable_baselines3
import torch
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.vec_env import VecEnv

from loopwright.agents.rl.agent import Books, Learner, RlConfig
from loopwright.core.errors import storage
from loopwright.envs.gym.adapter import Driver, info_of

POLICY = "policy.zip"
_REPLAY = "replay.pkl"
_GIVEN = ("policy", "env", "_init_setup_model")


class SlotVecEnv(VecEnv):
    """A batch run for SB3: one trial per slot in flight, each an episode of its own."""

    def __init__(self, driver: Driver, slots: int) -> None:
        self._driver = driver
        self._actions: list[dict[str, Any]] = []
        super().__init__(slots, driver.observations.gym_space, driver.actions.gym_space)

    def _seen(self) -> Any:
        seen = [self._driver.regime_alone(self._driver.env.reset(slot).context) for slot in range(self.num_envs)]
        return _stacked(seen)

    def reset(self) -> Any:
        return self._seen()

    def step_async(self, actions: Any) -> None:
        self._actions = [self._driver.actions.decode(action) for action in actions]

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        told = self._driver.step(self._actions)
        rewards = np.array([self._driver.told(feedback) for feedback in told], np.float32)
        seen = self._seen()
        infos = [{**info_of(feedback), "TimeLimit.truncated": False} for feedback in told]
        for slot, info in enumerate(infos):
            info["terminal_observation"] = (
                {name: values[slot] for name, values in seen.items()} if isinstance(seen, dict) else seen[slot]
            )
        return seen, rewards, np.ones(self.num_envs, bool), infos

    def close(self) -> None:
        """Nothing here: the driver belongs to whoever made it."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name, None)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise AttributeError(attr_name)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise AttributeError(method_name)

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        del wrapper_class  # nothing is wrapped, whatever is asked for
        return [False] * len(list(self._get_indices(indices)))


class _Bounds(BaseCallback):
    """Stops before the next step would exceed the budget, and makes checkpoints.

    To stop is to drop what was collected since the last update; where that is due anyway, SB3 ends by itself after it.
    """

    def __init__(self, learner: "Sb3Learner", until: int) -> None:
        super().__init__()
        self._learner, self._until = learner, until

    def _on_step(self) -> bool:
        self._learner.checkpoint_if_due()
        return self._learner.fits(self._until) or self._update_is_due()

    def _update_is_due(self) -> bool:
        now = self.locals
        if "n_rollout_steps" in now:
            return bool(now["n_steps"] + 1 >= now["n_rollout_steps"])
        often: TrainFreq = now["train_freq"]
        return often.unit is TrainFrequencyUnit.STEP and bool(now["num_collected_steps"] >= often.frequency)


class Sb3Learner(Learner):
    """An SB3 algorithm; a checkpoint in the directory is gone on from."""

    def __init__(self, algorithm: str, env: Any, config: RlConfig, books: Books) -> None:
        super().__init__(config, books)
        directory = books.directory
        self._slots = int(getattr(env, "num_envs", 1))
        self._step_cost = books.cost * self._slots
        torch.set_num_threads(1)
        kind: type[BaseAlgorithm] = getattr(stable_baselines3, algorithm)
        if (directory / POLICY).exists():
            self.model = kind.load(directory / POLICY, env=env, device="cpu")
            if isinstance(self.model, OffPolicyAlgorithm) and (directory / _REPLAY).exists():
                self.model.load_replay_buffer(directory / _REPLAY)
        else:
            self.model = kind(_policy(env), env, **_options(algorithm, env, config, books))

    def learn(self, until: int) -> None:
        if self.fits(until):
            steps = (until - self.books.counted()) // self._step_cost * self._slots
            self.model.learn(steps, callback=_Bounds(self, until), reset_num_timesteps=False)

    def fits(self, until: int) -> bool:
        """Whether another step, of one trial and its repeats per slot, stays within the budget."""
        return self.books.counted() + self._step_cost <= until

    def act(self, observation: Any) -> Any:
        return self.model.predict(observation, deterministic=True)[0]

    def imitate(self, pairs: list[tuple[Any, Any]]) -> None:
        imitate(self.model, pairs)

    def save(self, directory: Path) -> None:
        with storage(directory):
            directory.mkdir(parents=True, exist_ok=True)
            if isinstance(self.model, OffPolicyAlgorithm):
                self.model.save_replay_buffer(directory / f".{_REPLAY}")
                (directory / f".{_REPLAY}").replace(directory / _REPLAY)
            self.model.save(directory / f".{POLICY}")
            (directory / f".{POLICY}").replace(directory / POLICY)


def _policy(env: Any) -> str:
    return "MultiInputPolicy" if isinstance(env.observation_space, spaces.Dict) else "MlpPolicy"


def option_names(algorithm: str) -> list[str]:
    """What the algorithm can be told beside its policy and environment."""
    return [name for name in signature(getattr(stable_baselines3, algorithm)).parameters if name not in _GIVEN]


def _options(algorithm: str, env: Any, config: RlConfig, books: Books) -> dict[str, Any]:
    slots, room = getattr(env, "num_envs", 1), books.room
    options: dict[str, Any] = {"seed": config.seed, "device": "cpu", "policy_kwargs": {"net_arch": list(config.hidden)}}
    if config.learning_rate is not None:
        options["learning_rate"] = config.learning_rate
    if algorithm in ("PPO", "A2C"):
        rollout = config.rollout or min(books.rollout(config) if algorithm == "PPO" else 8, room)
        options["n_steps"] = max(2, rollout // slots)
        if algorithm == "PPO":
            options["batch_size"] = min(64, options["n_steps"] * slots)
    else:
        options["learning_starts"] = min(100, max(1, room // 10))
        options["buffer_size"] = min(1_000_000, max(1000, room))
        if config.rollout is not None:
            options["train_freq"] = max(1, config.rollout // slots)
    return {**options, **config.options}


def imitate(model: BaseAlgorithm, pairs: Sequence[tuple[Any, Any]], steps: int = 400, batch: int = 64) -> None:
    """Behaviour cloning by the policy's own log-probability; every pair is seen at least ten times."""
    policy: Any = model.policy
    if not pairs or not hasattr(policy, "evaluate_actions"):
        return
    random = np.random.default_rng(model.seed)
    for _ in range(max(steps, 10 * len(pairs) // batch)):
        chosen = [pairs[index] for index in random.integers(len(pairs), size=min(batch, len(pairs)))]
        seen, _ = policy.obs_to_tensor(_stacked([observation for observation, _ in chosen]))
        actions = torch.as_tensor(np.stack([np.asarray(action) for _, action in chosen]))
        _, log_probability, _ = policy.evaluate_actions(seen, actions)
        policy.optimizer.zero_grad()
        (-log_probability.mean()).backward()
        policy.optimizer.step()


def _stacked(observations: Sequence[Any]) -> Any:
    if isinstance(observations[0], dict):
        return {name: np.stack([one[name] for one in observations]) for name in observations[0]}
    return np.stack(observations)


def load_policy(algorithm: str, directory: Path) -> Any:
    """The saved policy as a function from observation to action."""
    kind: type[BaseAlgorithm] = getattr(stable_baselines3, algorithm)
    model = kind.load(directory / POLICY, device="cpu")
    return lambda observation: model.predict(observation, deterministic=True)[0]
