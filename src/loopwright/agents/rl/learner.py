"""What the RL libraries share: configuration, algorithms, and the learner that each library implements."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, cast

from pydantic import Field

from loopwright.core.agent import AgentConfig
from loopwright.core.config import Config
from loopwright.ledger.steps import Step, Steps
from loopwright.ledger.trial_book import TrialBook
from loopwright.reports.curves import Curves
from loopwright.spaces.space import Space

MAX_REGIMES = 64
"""Above this many regimes, the policy is not evaluated under each."""


class EvaluationConfig(Config):
    """How a policy is evaluated during training."""

    every: int = Field(default=5000, ge=1)
    """Trials (in a live run: steps) between two evaluations; one more follows at the end."""
    episodes: int = Field(default=20, ge=1)
    """Episodes of each evaluation; in a batch run: measurements under each regime."""
    deterministic: bool = True
    """Whether the policy acts without exploration."""


class RlConfig(AgentConfig):
    """Options of every RL agent."""

    trials: int = Field(ge=1)
    """Budget in trials (in a live run: steps), including the evaluation of a batch run."""
    library: Literal["sb3", "rllib"] = "sb3"
    """The library that implements the algorithm: Stable-Baselines3 (extra `rl`) or RLlib (extra `ray`)."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Learning rate. Default: the library's own."""
    rollout: int | None = Field(default=None, ge=1)
    """Trials to collect before each update of the policy."""
    policy: str | None = None
    """The policy class: a name of the library, such as `CnnPolicy`, or `module:Class`. Default: chosen by the
    observation space (Stable-Baselines3 only)."""
    hidden: tuple[int, ...] | None = None
    """Sizes of the hidden layers of the policy network. Default: the algorithm's own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further options of the library's algorithm, under the library's own names."""
    checkpoint_every: int = Field(default=1000, ge=1)
    """Trials between two checkpoints of the policy."""
    evaluate: Annotated[int, Field(ge=0)] | EvaluationConfig = 1
    """In a batch run: how often to measure the policy and the best static action under each regime at the end. A table
    evaluates during training too, live runs included, and keeps the best policy beside the last."""
    normalize: bool = False
    """Whether observations and rewards are scaled by their running mean and variance (SB3's VecNormalize). The
    statistics are saved with the policy; the ledger and evaluations have the environment's own rewards."""
    seeds: tuple[int, ...] = ()
    """Train once with each of these seeds, instead of `seed`, `trials` each, and report the aggregate."""
    log: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Where curves are written besides the ledger; each needs its package."""
    warm_start: str | None = None
    """The output directory of an earlier run, relative to the scenario, whose trials the policy imitates first."""

    @property
    def budget(self) -> int | None:
        return None if self.trials is None else self.trials * (len(self.seeds) or 1)

    @property
    def evaluation(self) -> EvaluationConfig | None:
        """The evaluation during training, if there is one."""
        return self.evaluate if isinstance(self.evaluate, EvaluationConfig) else None

    @property
    def measurements(self) -> int:
        """How often the policy of a batch run is measured under each regime."""
        return self.evaluate.episodes if isinstance(self.evaluate, EvaluationConfig) else self.evaluate

    def evaluation_trials(self, space: Space, episode_trials: int) -> int:
        """Trials that the last evaluation takes: the policy and the best static action under each regime."""
        regimes = prod(space.parameters[name].size or 1 for name in space.drawn if name in space.parameters)
        return 2 * self.measurements * regimes * episode_trials if regimes <= MAX_REGIMES else 0


@dataclass(frozen=True)
class RlAlgorithm:
    """An RL algorithm and where it can be used."""

    name: str
    """Its name in the libraries, such as `PPO`, or `module:Class`."""
    libraries: tuple[str, ...] = ("sb3",)
    can_imitate: bool = False
    """Whether its policy can be trained on recorded actions first (warm start, Stable-Baselines3 only)."""
    min_update_steps: int = 2
    """Steps of each slot that an update needs at least."""
    action_spaces: tuple[str, ...] = ("Discrete", "MultiDiscrete", "MultiBinary", "Box")
    """Action spaces of live servers that it supports."""
    view: Literal["flat", "discrete"] = "flat"
    """The form in which it chooses the actions of a batch run."""
    masks: bool = False
    """Whether it asks the environment which actions are allowed."""

    def action_space_problem(self, action_space: Any, library: str) -> str | None:
        """Why the algorithm cannot act in the action space of a live server."""
        from loopwright.agents.rl.library_spaces import flat_actions, space_problem  # requires gymnasium

        if reason := space_problem(action_space, "the action space"):
            return reason
        actions = flat_actions(action_space, library)
        flat_space: Any = action_space if actions is None else actions.gym_space
        kind, flat_kind = type(action_space).__name__, type(flat_space).__name__
        needs_bounds = self.action_spaces == ("Box",)
        is_bounded = actions.is_bounded if actions is not None else flat_kind != "Box" or action_space.is_bounded()
        if needs_bounds and not is_bounded:
            return f"{self.name.lower()!r} needs bounds, but the server's action space is {action_space}"
        if flat_kind in self.action_spaces or (library == "rllib" and actions is None and kind in ("Dict", "Tuple")):
            return None
        supported = ", ".join(self.action_spaces)
        return f"{self.name.lower()!r} supports the action spaces {supported}; the server has a {kind}"


@dataclass(frozen=True)
class LearnerContext:
    """The run that a learner trains on, and its budget."""

    book: TrialBook
    trials_per_step: int
    """Trials that one step of the environment costs: the repeats."""
    max_steps: int
    """Steps of training within the budget."""
    flush: Callable[[], None]
    """Writes every recorded step to the ledger."""
    directory: Path
    """Where the policy is saved."""
    curves: Curves = field(default_factory=Curves)
    """Where curves are written besides the ledger."""


def default_rollout(steps: int) -> int:
    """Steps per update if `rollout` is not set, for a training of this length: a multiple of 64, the usual batch."""
    return min(2048, max(64, steps // 20 // 64 * 64))


class PolicyLearner(ABC):
    """A library's algorithm that trains a policy on one environment."""

    def __init__(self, config: RlConfig, context: LearnerContext) -> None:
        self.config, self.context = config, context
        self._saved_at = context.book.step
        self.evaluate_if_due: Callable[[PolicyLearner], None] = lambda _: None
        """Called between two steps of training."""
        self._steps = Steps(context.book.ledger)

    def log_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write one point of each curve to the configured tools."""
        self.context.curves.add(step, numbers)

    def record_update(self, numbers: Mapping[str, float]) -> None:
        """Write the numbers of an update, such as losses, to the ledger and to the configured tools."""
        step = Step(self.context.book.step, time.time(), numbers)
        self._steps.add("train", step)
        self.context.book.observers.notify("after_step", "train", step)
        self.log_numbers(step.step, {f"train/{name}": value for name, value in numbers.items()})

    def checkpoint_if_due(self) -> None:
        """Save the policy every `checkpoint_every` trials, after the trials that it learned from are in the ledger."""
        self.evaluate_if_due(self)
        if self.context.book.step - self._saved_at >= self.config.checkpoint_every:
            self._saved_at = self.context.book.step
            self.context.flush()
            with self.context.book.uninterrupted():
                self.save()

    @abstractmethod
    def learn(self, until: int) -> None:
        """Train until the run has used this many trials."""

    @abstractmethod
    def choose(self, observation: Any, state: Any, mask: Any, *, deterministic: bool) -> tuple[Any, Any]:
        """The policy's action and its new state; the state is None at the start of an episode."""

    def act(self, observation: Any) -> Any:
        """The policy's action, without exploration."""
        return self.choose(observation, None, None, deterministic=True)[0]

    @abstractmethod
    def write_policy(self, directory: Path) -> None:
        """Write the policy to a directory, from which `load_policy` reads it."""

    def save(self) -> None:
        """Write a checkpoint of the policy to `context.directory`."""
        self.write_policy(self.context.directory)

    def close(self) -> None:
        """Release what the learner holds."""


class ImitationLearner(PolicyLearner):
    """A learner whose policy can be trained on recorded actions first, as `RlAlgorithm.can_imitate` says."""

    @abstractmethod
    def imitate(self, pairs: list[tuple[Any, Any]]) -> None:
        """Warm start: learn to choose these actions for these observations."""


class Backend(Protocol):
    """What the module of a library provides."""

    def option_names(self, algorithm: str) -> list[str]:
        """The names that `options` may have. LoopwrightError if the algorithm does not exist."""

    def policy_names(self, algorithm: str) -> list[str]:
        """The names that `policy` may have; none if the library has no such choice."""

    def option_problems(self, algorithm: str, config: RlConfig) -> Iterable[tuple[str, str]]:
        """Which values of `options` cannot be used, each as its key and the reason."""

    def batch_env(self, driver: Any, slots: int) -> Any:
        """A batch run as the library's kind of environment. The caller closes the driver."""

    def live_env(self, env: Any) -> Any:
        """A live run as the library's kind of environment."""

    def build_learner(self, algorithm: str, env: Any, config: RlConfig, context: LearnerContext) -> PolicyLearner:
        """A learner that continues from the checkpoint in `context.directory`, if there is one."""

    def load_policy(self, algorithm: str, directory: Path) -> Callable[[Any], Any]:
        """A saved policy as a function from observation to action."""


def backend(library: str) -> Backend:
    """The backend of a library. Imports the library, which takes seconds."""
    return cast("Backend", import_module(f"loopwright.agents.rl.{'rllib_ray' if library == 'rllib' else 'sb3'}"))
