"""The backend for Stable-Baselines3: PPO, A2C, DQN and SAC. Import it late: torch and SB3 are heavy."""

from collections.abc import Callable, Sequence
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

from loopwright.agents.rl.learner import ImitationLearner, LearnerContext, RlConfig
from loopwright.core.errors import storage
from loopwright.envs.gym.adapter import Driver, step_info

_POLICY = "policy.zip"
_REPLAY = "replay.pkl"


class SlotVecEnv(VecEnv):
    """A batch run for SB3: one trial per slot in flight, each an episode. The driver belongs to the caller."""

    def __init__(self, driver: Driver, slots: int) -> None:
        self._driver = driver
        self._actions: list[dict[str, Any]] = []
        super().__init__(slots, driver.observations.gym_space, driver.actions.gym_space)

    def reset(self) -> Any:
        regimes = [self._driver.env.reset(slot).context for slot in range(self.num_envs)]
        return _stack([self._driver.encode_regime(regime) for regime in regimes])

    def step_async(self, actions: Any) -> None:
        self._actions = [self._driver.actions.decode(action) for action in actions]

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        feedback = self._driver.step(self._actions)
        rewards = np.array([self._driver.reward(one) for one in feedback], np.float32)
        observations = self.reset()
        infos = [{**step_info(one), "TimeLimit.truncated": False} for one in feedback]
        for slot, info in enumerate(infos):
            info["terminal_observation"] = (
                {name: values[slot] for name, values in observations.items()}
                if isinstance(observations, dict)
                else observations[slot]
            )
        return observations, rewards, np.ones(self.num_envs, bool), infos

    def close(self) -> None: ...

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name, None)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise AttributeError(attr_name)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise AttributeError(method_name)

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        del wrapper_class  # the slots have no wrappers
        return [False] * len(list(self._get_indices(indices)))


batch_env = SlotVecEnv


class _BudgetCallback(BaseCallback):
    """Stops before the next step would exceed the budget, and saves checkpoints.

    Stopping discards what was collected since the last update. If an update is due, SB3 stops by itself after it.
    """

    def __init__(self, learner: "Sb3Learner", until: int) -> None:
        super().__init__()
        self._learner, self._until = learner, until

    def _on_step(self) -> bool:
        self._learner.checkpoint_if_due()
        if self._learner.has_budget(self._until):
            return True
        if "n_rollout_steps" in self.locals:
            return bool(self.locals["n_steps"] + 1 >= self.locals["n_rollout_steps"])
        every: TrainFreq = self.locals["train_freq"]
        return every.unit is TrainFrequencyUnit.STEP and bool(self.locals["num_collected_steps"] >= every.frequency)


class Sb3Learner(ImitationLearner):
    """An SB3 algorithm. Continues from the checkpoint in the directory, if there is one."""

    def __init__(self, algorithm: str, env: Any, config: RlConfig, context: LearnerContext) -> None:
        super().__init__(config, context)
        directory = context.directory
        self._slots = int(getattr(env, "num_envs", 1))
        self._trials_per_step = context.trials_per_step * self._slots
        torch.set_num_threads(1)
        kind: type[BaseAlgorithm] = getattr(stable_baselines3, algorithm)
        if (directory / _POLICY).exists():
            self.model = kind.load(directory / _POLICY, env=env, device="cpu")
            if isinstance(self.model, OffPolicyAlgorithm) and (directory / _REPLAY).exists():
                self.model.load_replay_buffer(directory / _REPLAY)
        else:
            policy = "MultiInputPolicy" if isinstance(env.observation_space, spaces.Dict) else "MlpPolicy"
            self.model = kind(policy, env, **_options(algorithm, self._slots, config, context))

    def learn(self, until: int) -> None:
        if self.has_budget(until):
            steps = (until - self.context.book.step) // self._trials_per_step * self._slots
            self.model.learn(steps, callback=_BudgetCallback(self, until), reset_num_timesteps=False)

    def has_budget(self, until: int) -> bool:
        """Whether another step, of one trial and its repeats per slot, stays within the budget."""
        return self.context.book.step + self._trials_per_step <= until

    def act(self, observation: Any) -> Any:
        return self.model.predict(observation, deterministic=True)[0]

    def imitate(self, pairs: list[tuple[Any, Any]], steps: int = 400, batch: int = 64) -> None:
        """Behaviour cloning by the policy's log-probability; every pair is used about ten times or more."""
        policy: Any = self.model.policy
        if not pairs:
            return
        random = np.random.default_rng(self.model.seed)
        for _ in range(max(steps, 10 * len(pairs) // batch)):
            sample = [pairs[index] for index in random.integers(len(pairs), size=min(batch, len(pairs)))]
            observations, _ = policy.obs_to_tensor(_stack([observation for observation, _ in sample]))
            actions = torch.as_tensor(np.stack([np.asarray(action) for _, action in sample]))
            _, log_probability, _ = policy.evaluate_actions(observations, actions)
            policy.optimizer.zero_grad()
            (-log_probability.mean()).backward()
            policy.optimizer.step()

    def save(self) -> None:
        directory = self.context.directory
        with storage(directory):
            directory.mkdir(parents=True, exist_ok=True)
            if isinstance(self.model, OffPolicyAlgorithm):
                self.model.save_replay_buffer(directory / f".{_REPLAY}")
                (directory / f".{_REPLAY}").replace(directory / _REPLAY)
            self.model.save(directory / f".{_POLICY}")
            (directory / f".{_POLICY}").replace(directory / _POLICY)


build_learner = Sb3Learner


def option_names(algorithm: str) -> list[str]:
    """The keyword arguments of the algorithm, except for those that the learner sets."""
    names = signature(getattr(stable_baselines3, algorithm)).parameters
    return [name for name in names if name not in ("policy", "env", "_init_setup_model")]


def _options(algorithm: str, slots: int, config: RlConfig, context: LearnerContext) -> dict[str, Any]:
    max_steps = context.max_steps
    options: dict[str, Any] = {"seed": config.seed, "device": "cpu", "policy_kwargs": {"net_arch": list(config.hidden)}}
    if config.learning_rate is not None:
        options["learning_rate"] = config.learning_rate
    if algorithm in ("PPO", "A2C"):
        default = context.default_rollout(config) if algorithm == "PPO" else 8
        options["n_steps"] = max(2, (config.rollout or min(default, max_steps)) // slots)
        if algorithm == "PPO":
            options["batch_size"] = min(64, options["n_steps"] * slots)
    else:
        options["learning_starts"] = min(100, max(1, max_steps // 10))
        options["buffer_size"] = min(1_000_000, max(1000, max_steps))
        if config.rollout is not None:
            options["train_freq"] = max(1, config.rollout // slots)
    return {**options, **config.options}


def _stack(observations: Sequence[Any]) -> Any:
    if isinstance(observations[0], dict):
        return {name: np.stack([one[name] for one in observations]) for name in observations[0]}
    return np.stack(observations)


def load_policy(algorithm: str, directory: Path) -> Callable[[Any], Any]:
    """The saved policy as a function from observation to action."""
    kind: type[BaseAlgorithm] = getattr(stable_baselines3, algorithm)
    model = kind.load(directory / _POLICY, device="cpu")
    return lambda observation: model.predict(observation, deterministic=True)[0]
