"""The base of all agents: something that runs against an environment. How it learns or searches is its own affair."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from loopwright.core.config import Config
from loopwright.core.errors import Problem
from loopwright.core.registry import Registry


class AgentConfig(Config):
    """The settings that every agent has."""

    type: str
    trials: int | None = Field(default=None, ge=1)
    """How many trials the run may use; repeats and cached trials count."""
    seed: int = 0
    """The source of all the run's randomness, draws included."""
    count_cached: bool = True
    """Whether a trial that was answered from the cache uses up budget."""

    @property
    def budget(self) -> int | None:
        """How many trials the run may use in total."""
        return self.trials


class Agent(ABC):
    """Runs against an environment, which the run's kind decides: a search, a live server or rollouts.

    An agent that proposes actions one by one extends `SearchAgent`, which has the loop for that. This base is for
    agents with their own loop:

        class Training(Agent):
            Config = TrainingConfig

            def run(self) -> int:
                ...
                return 0
    """

    Config: ClassVar[type[AgentConfig]] = AgentConfig
    samples_env_params: ClassVar[bool] = False
    """Whether the agent works with parameters that the environment draws; its docstring says how it uses them."""
    conditions_on_regime: ClassVar[bool] = False
    """Whether the agent's answer is an action for each regime, not one for all."""
    steps_live: ClassVar[bool] = False
    """Whether the agent can act in a live environment, whose spaces come from a server."""
    gives_weights: ClassVar[bool] = False
    """Whether the agent trains the policy, so that engines must accept weights from it."""
    several_objectives: ClassVar[bool] = False
    """Whether the agent can weigh several rewards against one another."""
    measures_again: ClassVar[bool] = False
    """Whether an action that is proposed again is measured again, instead of answered from the cache."""

    confirms: ClassVar[bool] = False
    """Whether part of the trials measures the best configurations again, where the scenario does not say."""

    def __init__(self, env: Any, config: Any, *, parallel: int = 1) -> None:
        self.env, self.config, self.parallel = env, config, parallel

    @classmethod
    def problems(cls, config: Any, space: Any, home: Path) -> list[Problem]:
        """What is wrong with this configuration over this space; checked when the scenario is loaded."""
        return []

    @classmethod
    def hints(cls, config: Any, space: Any, regimes: int) -> list[Problem]:
        """What is legal but probably not meant; `regimes` is how many may be drawn."""
        return []

    @classmethod
    def observation_problem(cls, observation_space: Any) -> str | None:
        """Why the agent cannot observe this space of a live server; checked when the scenario is loaded."""
        return None

    @classmethod
    def too_little(
        cls, config: Any, space: Any, repeats: int = 1, parallel: int = 1, episode_trials: int = 1
    ) -> list[Problem]:
        """Why the budget is too small to give a result. `space` is None for a live run."""
        return []

    @abstractmethod
    def run(self) -> int:
        """The whole run. Returns 0, or another number for a failure that leaves the other runs of a scenario unharmed.

        Codes accumulate, and the next run starts. An exception is a bug: no further run starts, reports are still made,
        and the exception reaches the user unchanged. SIGINT and SIGTERM raise `RunStopped` here: let it pass.
        """

    def shutdown(self) -> None:
        """Release what `run` built. Always called; if it raises, the run's code is not 0."""


agents: Registry[type[Agent]] = Registry("agent", "loopwright.agents", Agent)
"""The agents of search and live runs."""
rollout_agents: Registry[type[Agent]] = Registry("agent", "loopwright.rollout_agents", Agent)
"""The agents of runs with [run.rollout]."""
