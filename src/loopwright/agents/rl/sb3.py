"""The backend for Stable-Baselines3 and algorithms built on it. Import it late: torch and SB3 are heavy."""

import math
import pickle
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import stable_baselines3
import torch
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.vec_env import VecNormalize

from loopwright.agents.rl.learner import ImitationLearner, LearnerContext, RlConfig, default_rollout
from loopwright.agents.rl.library_spaces import is_large_image
from loopwright.agents.rl.options import read_option
from loopwright.agents.rl.vec_envs import LiveVecEnv, SlotVecEnv, stack
from loopwright.core.errors import LoopwrightError, MissingExtra, storage
from loopwright.core.imports import import_object

_POLICY = "policy.zip"
_REPLAY = "replay.pkl"
_SCALING = "normalize.pkl"
_LOGGED = {"rollout/ep_rew_mean": "return", "rollout/ep_len_mean": "length", "time/fps": "steps_per_s"}
_BATCH = 64
"""SB3's usual minibatch."""


def algorithm_class(name: str) -> type[BaseAlgorithm]:
    """The class of an algorithm: of SB3, of sb3_contrib, or at `module:Class`."""
    path = (
        name if ":" in name else f"{'stable_baselines3' if hasattr(stable_baselines3, name) else 'sb3_contrib'}:{name}"
    )
    try:
        kind = import_object(path)
    except ImportError as error:
        if path.startswith("sb3_contrib:") and getattr(error, "name", "") == "sb3_contrib":
            raise MissingExtra(f"algorithm {path!r}", "rl") from error
        raise LoopwrightError(f"algorithm {path!r}: {error}") from error
    except ValueError as error:
        raise LoopwrightError(f"algorithm {path!r}: {error}") from error
    if not isinstance(kind, type) or not issubclass(kind, BaseAlgorithm):
        raise LoopwrightError(f"algorithm {path!r} is not a class of Stable-Baselines3 algorithms (BaseAlgorithm)")
    return kind


batch_env = SlotVecEnv
live_env = LiveVecEnv


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
        every: TrainFreq | None = self.locals.get("train_freq")
        return (
            every is not None
            and every.unit is TrainFrequencyUnit.STEP
            and bool(self.locals["num_collected_steps"] >= every.frequency)
        )


class _UpdateWriter(KVWriter):
    """Receives what SB3 logs: losses, KL divergence, entropy, explained variance, learning rate, mean return."""

    def __init__(self, learner: "Sb3Learner") -> None:
        self._learner = learner
        self._next = 0

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, Any], step: int = 0) -> None:
        del key_excluded, step
        numbers = {_LOGGED.get(key, key.removeprefix("train/")): value for key, value in key_values.items()}
        finite = {
            name: float(v) for name, v in numbers.items() if "/" not in name and isinstance(v, float | int | np.number)
        }
        context = self._learner.context
        # Off-policy algorithms log every few episodes, which may be every few steps.
        if finite.keys() - {"n_updates", "steps_per_s"} and context.book.step >= self._next:
            self._next = context.book.step + max(1, context.max_steps // 1000)
            self._learner.record_update(finite)

    def close(self) -> None: ...


class Sb3Learner(ImitationLearner):
    """An SB3 algorithm. Continues from the checkpoint in the directory, if there is one."""

    def __init__(self, algorithm: str, env: Any, config: RlConfig, context: LearnerContext) -> None:
        super().__init__(config, context)
        directory = context.directory
        self._slots = int(getattr(env, "num_envs", 1))
        self._trials_per_step = context.trials_per_step * self._slots
        torch.set_num_threads(1)
        kind = algorithm_class(algorithm)
        self._scaling: VecNormalize | None = None
        if config.normalize:
            is_saved = (directory / _SCALING).exists()
            env = VecNormalize.load(str(directory / _SCALING), env) if is_saved else VecNormalize(env)
            self._scaling = env
        if (directory / _POLICY).exists():
            self.model = kind.load(directory / _POLICY, env=env, device="cpu")
            if isinstance(self.model, OffPolicyAlgorithm) and (directory / _REPLAY).exists():
                self.model.load_replay_buffer(directory / _REPLAY)
        else:
            policy = _policy(kind, env.observation_space, config.policy)
            self.model = kind(policy, env, **_options(kind, self._slots, config, context))
        self._masks = "action_masks" in signature(kind.predict).parameters
        self.model.set_logger(Logger(None, [_UpdateWriter(self)]))

    def learn(self, until: int) -> None:
        if self.has_budget(until):
            steps = (until - self.context.book.step) // self._trials_per_step * self._slots
            self.model.learn(steps, callback=_BudgetCallback(self, until), reset_num_timesteps=False)
            self.model.logger.dump(self.model.num_timesteps)  # what the last update measured

    def has_budget(self, until: int) -> bool:
        """Whether another step, of one trial and its repeats per slot, stays within the budget."""
        return self.context.book.step + self._trials_per_step <= until

    def choose(self, observation: Any, state: Any, mask: Any, *, deterministic: bool) -> tuple[Any, Any]:
        options = {} if mask is None or not self._masks else {"action_masks": np.asarray(mask, bool)}
        start = np.array([state is None])
        if self._scaling is not None:
            observation = self._scaling.normalize_obs(observation)
        return self.model.predict(observation, state, start, deterministic=deterministic, **options)

    def imitate(self, pairs: list[tuple[Any, Any]], steps: int = 400, batch: int = 64) -> None:
        """Behaviour cloning by the policy's log-probability; every pair is used about ten times or more."""
        policy: Any = self.model.policy
        if not pairs:
            return
        random = np.random.default_rng(self.model.seed)
        for _ in range(max(steps, 10 * len(pairs) // batch)):
            sample = [pairs[index] for index in random.integers(len(pairs), size=min(batch, len(pairs)))]
            observations, _ = policy.obs_to_tensor(stack([observation for observation, _ in sample]))
            actions = torch.as_tensor(np.stack([np.asarray(action) for _, action in sample]))
            _, log_probability, _ = policy.evaluate_actions(observations, actions)
            policy.optimizer.zero_grad()
            (-log_probability.mean()).backward()
            policy.optimizer.step()

    def write_policy(self, directory: Path) -> None:
        with storage(directory):
            directory.mkdir(parents=True, exist_ok=True)
            if self._scaling is not None:
                self._scaling.save(str(directory / f".{_SCALING}"))
                (directory / f".{_SCALING}").replace(directory / _SCALING)
            self.model.save(directory / f".{_POLICY}")
            (directory / f".{_POLICY}").replace(directory / _POLICY)

    def save(self) -> None:
        directory = self.context.directory
        with storage(directory):
            directory.mkdir(parents=True, exist_ok=True)
            if isinstance(self.model, OffPolicyAlgorithm):
                self.model.save_replay_buffer(directory / f".{_REPLAY}")
                (directory / f".{_REPLAY}").replace(directory / _REPLAY)
        super().save()


build_learner = Sb3Learner


def option_names(algorithm: str) -> list[str]:
    """The keyword arguments of the algorithm, except for those that the learner sets."""
    names = signature(algorithm_class(algorithm)).parameters
    return [name for name in names if name not in ("policy", "env", "_init_setup_model")]


def option_problems(algorithm: str, config: RlConfig) -> Iterator[tuple[str, str]]:
    """What is wrong with the values of options: of the wrong type, or a device that is not there."""
    parameters = signature(algorithm_class(algorithm)).parameters
    for name, value in config.options.items():
        try:
            if name in parameters:
                read_option(parameters[name].annotation, parameters[name].default, value)
            if name == "device":
                _check_device(value)
        except ValueError as error:
            yield f"options.{name}", str(error)


def _check_device(name: str) -> None:
    try:
        device = torch.device("cpu" if name == "auto" else name)
    except (RuntimeError, TypeError):
        raise ValueError(f"{name!r} is not a device; write 'cpu', 'cuda' or 'cuda:1'.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"there is no device {name!r}: CUDA has {torch.cuda.device_count()} devices here; use 'cpu'.")


def policy_names(algorithm: str) -> list[str]:
    """The names that `policy` may have, besides `module:Class`."""
    return list(algorithm_class(algorithm).policy_aliases)


def _policy(kind: type[BaseAlgorithm], space: "spaces.Space[Any]", name: str | None) -> Any:
    """The policy class that the configuration names, or the one that suits the observations."""
    if name is not None:
        return import_object(name) if ":" in name else name
    prefix = "MultiInput" if isinstance(space, spaces.Dict) else "Cnn" if is_large_image(space) else "Mlp"
    # Some algorithms have other names for the same, such as MlpLstmPolicy.
    return next((alias for alias in kind.policy_aliases if alias.startswith(prefix)), f"{prefix}Policy")


def _options(kind: type[BaseAlgorithm], slots: int, config: RlConfig, context: LearnerContext) -> dict[str, Any]:
    """The keyword arguments of the algorithm: ours where the budget is smaller than its defaults, then the user's."""
    max_steps, parameters = context.max_steps, signature(kind).parameters
    options: dict[str, Any] = {"seed": config.seed, "device": "cpu"}
    if config.hidden is not None:
        options["policy_kwargs"] = {"net_arch": list(config.hidden)}
    if config.learning_rate is not None:
        options["learning_rate"] = config.learning_rate
    if "n_steps" in parameters and not issubclass(kind, OffPolicyAlgorithm):
        batched = "batch_size" in parameters
        default = default_rollout(config.trials // context.trials_per_step) if batched else 8
        steps = options["n_steps"] = max(2, (config.rollout or min(default, max_steps)) // slots)
        if batched:
            # Near to SB3's own, and a divisor of a rollout: a shorter last minibatch would weigh too much.
            size = int(config.options.get("n_steps", steps)) * slots
            divisors = [part for part in range(1, size + 1) if size % part == 0]
            options["batch_size"] = min(divisors, key=lambda part: abs(math.log(part / _BATCH)))
    elif issubclass(kind, OffPolicyAlgorithm):
        options["learning_starts"] = min(100, max(1, max_steps // 10))
        options["buffer_size"] = min(1_000_000, max(1000, max_steps))
        if config.rollout is not None:
            options["train_freq"] = max(1, config.rollout // slots)
    options |= {
        name: read_option(parameters[name].annotation, parameters[name].default, value)
        for name, value in config.options.items()
    }
    if config.hidden is not None and "policy_kwargs" in config.options:
        options["policy_kwargs"] = {"net_arch": list(config.hidden), **config.options["policy_kwargs"]}
    return {name: value for name, value in options.items() if name in parameters}


def load_policy(algorithm: str, directory: Path) -> Callable[[Any], Any]:
    """The saved policy as a function from observation to action."""
    model = algorithm_class(algorithm).load(directory / _POLICY, device="cpu")
    if not (directory / _SCALING).exists():
        return lambda observation: model.predict(observation, deterministic=True)[0]
    with (directory / _SCALING).open("rb") as file:
        scaling: VecNormalize = pickle.load(file)  # noqa: S301  as SB3 loads policies
    return lambda observation: model.predict(scaling.normalize_obs(observation), deterministic=True)[0]
