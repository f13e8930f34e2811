"""RLlib as a learner: PPO and DQN on Ray's API stack, stepping our environment in this very process."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import ray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.utils.spaces.space_utils import unsquash_action
from ray.tune.registry import register_env

from loopwright.agents.rl.agent import Books, Learner, RlConfig
from loopwright.core.errors import storage
from loopwright.envs.gym.adapter import Driver, info_of
from loopwright.envs.gym.codec import RowCodec

_CHECKPOINT, _OLDER = "rllib", "rllib.older"
_KINDS: dict[str, type[Any]] = {"PPO": PPOConfig, "DQN": DQNConfig}
_worlds: dict[str, gym.Env[Any, Any]] = {}
"""Environments by key: RLlib wants to make them itself, but ours hold a ledger and cannot be pickled."""


class FlatWorld(gym.Env[Any, Any]):
    """A batch run with observations in one row of numbers, as RLlib's default networks take them."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.action_space = driver.actions.gym_space
        self._row = RowCodec(driver.observations.gym_space)
        self.observation_space = self._row.gym_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return self._row.encode(self._driver.regime_alone(self._driver.env.reset().context)), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        (feedback,) = self._driver.step([self._driver.actions.decode(action)])
        seen = self._row.encode(self._driver.regime_alone(feedback.observation.context))
        return seen, self._driver.told(feedback), True, False, info_of(feedback)


def _world(context: Any) -> gym.Env[Any, Any]:
    return _worlds[context["key"]]


class RllibLearner(Learner):
    """An RLlib algorithm without remote runners; a checkpoint in the directory is gone on from."""

    def __init__(self, algorithm: str, env: Any, config: RlConfig, books: Books) -> None:
        super().__init__(config, books)
        directory = books.directory
        self._began_ray = not ray.is_initialized()
        if self._began_ray:
            ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        self._key = str(directory)
        _worlds[self._key] = FlatWorld(env) if isinstance(env, Driver) else env
        register_env("loopwright", _world)
        self._batch = min(config.rollout or books.rollout(config), books.room)
        made: Any = _configured(algorithm, config, self._key, self._batch).build_algo()
        self._algorithm = made
        # A crash between the two renames of `save` leaves only the older one.
        for found in (directory / _CHECKPOINT, directory / _OLDER):
            if found.exists():
                self._algorithm.restore_from_path(str(found.absolute()))
                break

    def learn(self, until: int) -> None:
        while (left := (until - self.books.counted()) // self.books.cost) > 0:
            with self._shortened(left) if left < self._batch else nullcontext():
                self._algorithm.train()
            self.checkpoint_if_due()

    @contextmanager
    def _shortened(self, steps: int) -> Iterator[None]:
        """A last batch of what is left of the budget: RLlib looks its size up whenever it collects one."""
        owners = (self._algorithm, self._algorithm.env_runner)
        whole = [owner.config for owner in owners]
        for owner in owners:
            owner.config = _sized(owner.config, steps)
        try:
            yield
        finally:
            for owner, config in zip(owners, whole, strict=True):
                owner.config = config

    def act(self, observation: Any) -> Any:
        space = _worlds[self._key].observation_space
        flat = observation if np.shape(observation) == space.shape else _joined(observation)
        module = self._algorithm.get_module()
        assert module is not None  # noqa: S101
        return _choose(module, flat)

    def imitate(self, pairs: list[tuple[Any, Any]]) -> None:
        """Not offered by RLlib's stack without a data set on disk; such a policy starts cold."""

    def save(self, directory: Path) -> None:
        new, now, older = (directory / name for name in (f".{_CHECKPOINT}", _CHECKPOINT, _OLDER))
        with storage(directory):
            shutil.rmtree(new, ignore_errors=True)
            self._algorithm.save_to_path(str(new.absolute()))
            if now.exists():
                shutil.rmtree(older, ignore_errors=True)
                now.rename(older)
            new.rename(now)
            shutil.rmtree(older, ignore_errors=True)

    def close(self) -> None:
        self._algorithm.stop()
        _worlds.pop(self._key, None)
        if self._began_ray:
            ray.shutdown()


def option_names(algorithm: str) -> list[str]:
    """What `training()` takes: each configuration adds its own to what those before it take."""
    methods = [vars(kind)["training"] for kind in _KINDS[algorithm].__mro__ if "training" in vars(kind)]
    found = [name for method in methods for name in _keywords(method)]
    return list(dict.fromkeys(found))


def _keywords(callee: Any) -> list[str]:
    return [
        name for name, parameter in signature(callee).parameters.items() if parameter.kind is parameter.KEYWORD_ONLY
    ]


def _configured(algorithm: str, config: RlConfig, key: str, batch: int) -> AlgorithmConfig:
    made: AlgorithmConfig = _KINDS[algorithm]()
    options: dict[str, Any] = {} if config.learning_rate is None else {"lr": config.learning_rate}
    if algorithm == "PPO":
        options |= {"train_batch_size_per_learner": batch, "minibatch_size": min(64, batch), "num_epochs": 10}
    else:
        options |= {"train_batch_size_per_learner": 32, "num_steps_sampled_before_learning_starts": min(100, batch)}
    return (
        made.environment("loopwright", env_config={"key": key})
        .env_runners(num_env_runners=0, rollout_fragment_length=batch if algorithm == "PPO" else 1)
        .learners(num_learners=0)
        .reporting(min_sample_timesteps_per_iteration=0 if algorithm == "PPO" else batch, min_time_s_per_iteration=0)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=list(config.hidden)))
        .debugging(seed=config.seed, log_level="ERROR")
        .training(**{**options, **config.options})
    )


def _sized(config: AlgorithmConfig, steps: int) -> AlgorithmConfig:
    """The same, but for iterations of so many steps."""
    made: Any = config.copy(copy_frozen=False)
    if made.algo_class is PPO:
        made.train_batch_size_per_learner = made.rollout_fragment_length = steps
        made.minibatch_size = min(made.minibatch_size or steps, steps)
    else:
        made.min_sample_timesteps_per_iteration = steps
    return made  # type: ignore[no-any-return]


def _joined(observation: Any) -> Any:
    # The order of gymnasium's own flattening: keys sorted.
    return np.concatenate([np.ravel(observation[name]) for name in sorted(observation)]).astype(np.float32)


def _choose(module: RLModule, observation: Any) -> Any:
    import torch

    with torch.no_grad():
        out = module.forward_inference({"obs": torch.as_tensor(np.asarray(observation, np.float32))[None]})
    if "actions" in out:
        chosen = out["actions"][0].numpy()
    else:
        distribution: Any = module.get_inference_action_dist_cls().from_logits(out["action_dist_inputs"])
        chosen = distribution.to_deterministic().sample()[0].numpy()
    # As RLlib does on the way to the environment: the network's numbers, around 0, are spread over a Box and clipped.
    space = module.action_space
    if not isinstance(space, gym.spaces.Box):
        return chosen
    return np.asarray(unsquash_action(chosen, space), space.dtype)  # type: ignore[no-untyped-call]


def load_policy(_: str, directory: Path) -> Any:
    """The saved policy as a function from observation to action."""
    path = directory / _CHECKPOINT / "learner_group" / "learner" / "rl_module" / "default_policy"
    module = RLModule.from_checkpoint(str(path.absolute()))
    return lambda seen: _choose(module, _joined(seen) if isinstance(seen, dict) else seen)
