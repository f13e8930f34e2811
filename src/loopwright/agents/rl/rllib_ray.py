"""The backend for RLlib: PPO and DQN on Ray's new API stack, stepping the environment in this process."""

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, cast

import gymnasium as gym
import numpy as np
import ray
import torch
import tree
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec
from ray.rllib.utils.from_config import NotProvided
from ray.rllib.utils.spaces.space_utils import get_base_struct_from_space, unsquash_action
from ray.tune.registry import register_env

from loopwright.agents.rl.learner import LearnerContext, PolicyLearner, RlConfig, default_rollout
from loopwright.agents.rl.library_spaces import wrap_for_library
from loopwright.agents.rl.options import read_option
from loopwright.agents.rl.rllib_networks import DqnPartsCatalog, PpoPartsCatalog
from loopwright.core.errors import storage
from loopwright.core.trial import Observation
from loopwright.envs.gym.adapter import Driver, LiveAdapter, step_info
from loopwright.envs.gym.codec import FlattenCodec
from loopwright.envs.live.env import LiveEnv

_CHECKPOINT, _PREVIOUS = "rllib", "rllib.older"
_CONFIGS: dict[str, type[Any]] = {"PPO": PPOConfig, "DQN": DQNConfig}
_CATALOGS: dict[str, type[Any]] = {"PPO": PpoPartsCatalog, "DQN": DqnPartsCatalog}
_environments: dict[str, gym.Env[Any, Any]] = {}
"""Environments by key: RLlib makes them itself, but ours hold a ledger and cannot be pickled."""


class FlatBatchEnv(gym.Env[Any, Any]):
    """A batch run whose observations are a vector, as RLlib's default networks take it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.action_space = driver.actions.gym_space
        self._flatten = FlattenCodec(driver.observations.gym_space)
        self.observation_space = self._flatten.gym_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return self._encode(self._driver.env.reset()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        (feedback,) = self._driver.step([self._driver.actions.decode(action)])
        reward, info = self._driver.reward(feedback), step_info(feedback)
        return self._encode(feedback.observation), reward, feedback.terminated, False, info

    def _encode(self, observation: Observation) -> Any:
        return self._flatten.encode(self._driver.encode_for_policy(observation))


def batch_env(driver: Driver, _: int) -> FlatBatchEnv:
    """A batch run for RLlib, which steps one trial at a time."""
    return FlatBatchEnv(driver)


def live_env(env: LiveEnv) -> gym.Env[Any, Any]:
    """A live run for RLlib, which steps one environment."""
    return wrap_for_library(LiveAdapter(env), "rllib")


def _environment(env_config: Any) -> gym.Env[Any, Any]:  # a module-level function, since Ray pickles it
    return _environments[env_config["key"]]


class RllibLearner(PolicyLearner):
    """An RLlib algorithm without remote runners. Continues from the checkpoint in the directory, if there is one."""

    def __init__(self, algorithm: str, env: Any, config: RlConfig, context: LearnerContext) -> None:
        super().__init__(config, context)
        directory = context.directory
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        self._key = str(directory)
        _environments[self._key] = env
        register_env("loopwright", _environment)
        self._batch = min(
            config.rollout or default_rollout(config.trials // context.trials_per_step), context.max_steps
        )
        self._algorithm = cast("Any", _algorithm_config(algorithm, config, self._key, self._batch).build_algo())
        # A crash between the two renames of `save` leaves only the previous checkpoint.
        for checkpoint in (directory / _CHECKPOINT, directory / _PREVIOUS):
            if checkpoint.exists():
                self._algorithm.restore_from_path(str(checkpoint.absolute()))
                break

    def learn(self, until: int) -> None:
        while (left := (until - self.context.book.step) // self.context.trials_per_step) > 0:
            with self._shorter_batch(left) if left < self._batch else nullcontext():
                result = self._algorithm.train()
            # Losses, KL divergence, entropy, learning rate.
            numbers = result.get("learners", {}).get("default_policy", {})
            self.record_update({str(n): float(v) for n, v in numbers.items() if isinstance(v, float | int | np.number)})
            self.checkpoint_if_due()

    @contextmanager
    def _shorter_batch(self, steps: int) -> Iterator[None]:
        """A last batch of the remaining budget. RLlib reads the size from its config whenever it collects a batch."""
        owners = (self._algorithm, self._algorithm.env_runner)
        configs = [owner.config for owner in owners]
        for owner in owners:
            owner.config = _with_batch(owner.config, steps)
        try:
            yield
        finally:
            for owner, config in zip(owners, configs, strict=True):
                owner.config = config

    def choose(self, observation: Any, state: Any, mask: Any, *, deterministic: bool) -> tuple[Any, Any]:
        del state, mask, deterministic  # its inference does not explore, and these networks have no state
        return _predict(self._algorithm.get_module(), observation), None

    def write_policy(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        new, current, previous = (directory / name for name in (f".{_CHECKPOINT}", _CHECKPOINT, _PREVIOUS))
        with storage(directory):
            shutil.rmtree(new, ignore_errors=True)
            self._algorithm.save_to_path(str(new.absolute()))
            if current.exists():
                shutil.rmtree(previous, ignore_errors=True)
                current.rename(previous)
            new.rename(current)
            shutil.rmtree(previous, ignore_errors=True)

    def close(self) -> None:
        self._algorithm.stop()
        _environments.pop(self._key, None)
        if self._owns_ray:
            ray.shutdown()


build_learner = RllibLearner


def option_names(algorithm: str) -> list[str]:
    """The keyword arguments of `training()`."""
    return list(_parameters(algorithm))


def _parameters(algorithm: str) -> dict[str, Parameter]:
    """The keyword arguments of `training()`, without deprecated ones. Each config class adds its own to its bases'."""
    methods = [vars(kind)["training"] for kind in _CONFIGS[algorithm].__mro__ if "training" in vars(kind)]
    parameters = [parameter for method in reversed(methods) for parameter in signature(method).parameters.values()]
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is NotProvided}


def option_problems(algorithm: str, config: RlConfig) -> Iterator[tuple[str, str]]:
    """What is wrong with the values of options: of the wrong type, or not valid together."""
    parameters, defaults = _parameters(algorithm), _CONFIGS[algorithm]()
    is_valid = True
    for name, value in config.options.items():
        try:
            if name in parameters:
                read_option(parameters[name].annotation, getattr(defaults, name, None), value)
        except ValueError as error:
            is_valid = False
            yield f"options.{name}", str(error)
    if is_valid and config.options.keys() <= parameters.keys():
        try:
            _algorithm_config(algorithm, config, "", config.rollout or default_rollout(config.trials)).validate()
        except (ValueError, TypeError, AttributeError) as error:
            yield "options", f"RLlib: {str(error).partition(chr(10))[0]}"


def policy_names(_: str) -> list[str]:
    """None: RLlib chooses the network by the observation space."""
    return []


def _algorithm_config(algorithm: str, config: RlConfig, key: str, batch: int) -> AlgorithmConfig:
    logging.getLogger("ray.rllib").setLevel(logging.ERROR)  # it recommends what is set here
    algorithm_config: AlgorithmConfig = _CONFIGS[algorithm]()
    parameters = _parameters(algorithm)
    options: dict[str, Any] = {} if config.learning_rate is None else {"lr": config.learning_rate}
    if algorithm == "PPO":
        fragment = batch
        options |= {"train_batch_size_per_learner": batch, "minibatch_size": min(64, batch), "num_epochs": 10}
    else:
        fragment = config.options.get("n_step", 1)
        options |= {"train_batch_size_per_learner": 32, "num_steps_sampled_before_learning_starts": min(100, batch)}
    network: dict[str, Any] = {} if config.hidden is None else {"fcnet_hiddens": list(config.hidden)}
    for name, value in config.options.items():
        options[name] = read_option(parameters[name].annotation, getattr(algorithm_config, name, None), value)
    return (
        algorithm_config.environment("loopwright", env_config={"key": key})
        .env_runners(num_env_runners=0, rollout_fragment_length=fragment)
        .learners(num_learners=0)
        .reporting(min_sample_timesteps_per_iteration=0 if algorithm == "PPO" else batch, min_time_s_per_iteration=0)
        .rl_module(
            model_config=DefaultModelConfig(**network),
            rl_module_spec=RLModuleSpec(catalog_class=_CATALOGS[algorithm]),
        )
        .debugging(seed=config.seed, log_level="ERROR")
        .training(**options)
    )


def _with_batch(config: AlgorithmConfig, steps: int) -> AlgorithmConfig:
    """A copy whose iterations collect this many steps."""
    changed: Any = config.copy(copy_frozen=False)
    if changed.algo_class is PPO:
        changed.train_batch_size_per_learner = changed.rollout_fragment_length = steps
        changed.minibatch_size = min(changed.minibatch_size or steps, steps)
    else:
        changed.min_sample_timesteps_per_iteration = steps
    return changed  # type: ignore[no-any-return]


def _predict(module: RLModule, observation: Any) -> Any:
    """The action that the policy prefers."""
    if isinstance(observation, dict) and not isinstance(module.observation_space, gym.spaces.Dict):
        # A batch policy observes a vector, in the order of gymnasium's flattening: keys sorted.
        observation = np.concatenate([np.ravel(observation[name]) for name in sorted(observation)])
    batch = tree.map_structure(lambda part: torch.as_tensor(np.asarray(part, np.float32))[None], observation)
    with torch.no_grad():
        out = module.forward_inference({"obs": batch})
    if "actions" in out:
        action = out["actions"][0].numpy()
    else:
        distribution: Any = module.get_inference_action_dist_cls().from_logits(out["action_dist_inputs"])
        action = tree.map_structure(lambda part: part[0].numpy(), distribution.to_deterministic().sample())
    # RLlib does the same before a step: it scales the network's output, around 0, to each Box and clips it.
    return unsquash_action(action, get_base_struct_from_space(module.action_space))  # type: ignore[no-untyped-call]


def load_policy(_: str, directory: Path) -> Callable[[Any], Any]:
    """The saved policy as a function from observation to action."""
    logging.getLogger("ray._common.deprecation").setLevel(logging.ERROR)  # it warns of its own calls
    path = directory / _CHECKPOINT / "learner_group" / "learner" / "rl_module" / "default_policy"
    module = RLModule.from_checkpoint(str(path.absolute()))
    return lambda observation: _predict(module, observation)
