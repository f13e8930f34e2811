"""What the RL libraries share: configuration, algorithms, and the learner that each library implements."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from pydantic import Field

from loopwright.core.agent import AgentConfig
from loopwright.ledger.trial_book import TrialBook
from loopwright.spaces.space import Space

MAX_REGIMES = 64
"""Above this many regimes, the policy is not evaluated under each."""


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
    evaluate: int = Field(default=1, ge=0)
    """How often to measure the policy and the best static action under each regime at the end."""
    warm_start: str | None = None
    """The output directory of an earlier run, relative to the scenario, whose trials the policy imitates first."""

    def evaluation_trials(self, space: Space, repeats: int) -> int:
        """Trials that the evaluation takes: the policy and the best static action under each regime."""
        regimes = prod(space.parameters[name].size or 1 for name in space.drawn if name in space.parameters)
        return 2 * self.evaluate * regimes * repeats if regimes <= MAX_REGIMES else 0


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
        if needs_bounds and flat_kind == "Box" and not flat_space.is_bounded():
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

    @property
    def directory(self) -> Path:
        """Where the policy is saved."""
        return self.book.directory / "policy"

    def default_rollout(self, config: RlConfig) -> int:
        """Steps per update if `rollout` is not set: a multiple of the usual batch of 64."""
        return min(2048, max(64, config.trials // self.trials_per_step // 20 // 64 * 64))


class PolicyLearner(ABC):
    """A library's algorithm that trains a policy on one environment."""

    def __init__(self, config: RlConfig, context: LearnerContext) -> None:
        self.config, self.context = config, context
        self._saved_at = context.book.step

    def checkpoint_if_due(self) -> None:
        """Save the policy every `checkpoint_every` trials, after the trials that it learned from are in the ledger."""
        if self.context.book.step - self._saved_at >= self.config.checkpoint_every:
            self._saved_at = self.context.book.step
            self.context.flush()
            self.save()

    @abstractmethod
    def learn(self, until: int) -> None:
        """Train until the run has used this many trials."""

    @abstractmethod
    def act(self, observation: Any) -> Any:
        """The policy's action, without exploration."""

    @abstractmethod
    def save(self) -> None:
        """Write a checkpoint of the policy to `context.directory`."""

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
        """The names that `options` may have. Raises LoopwrightError if there is no such algorithm."""

    def policy_names(self, algorithm: str) -> list[str]:
        """The names that `policy` may have; none if the library has no such choice."""

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
