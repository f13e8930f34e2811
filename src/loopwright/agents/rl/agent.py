"""RL agents: a policy that learns on any run, batch or live, by a library's own algorithm and loop."""

import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from loopwright.core.agent import Agent, AgentConfig
from loopwright.core.errors import LoopwrightError, MissingExtra, Problem, StorageError, did_you_mean, sentence
from loopwright.core.trial import Action, Observation, Proposal
from loopwright.envs.live.env import LiveEnv
from loopwright.envs.live.server import ServerLost
from loopwright.spaces.parameter import Range
from loopwright.spaces.space import Space

log = logging.getLogger(__name__)
MOST_POINTS = 4096
"""Beyond this many points an algorithm that numbers them all learns nothing."""
MOST_REGIMES = 64
"""Beyond this many regimes a policy is not evaluated under each."""


class RlConfig(AgentConfig):
    """What every RL agent can be told."""

    trials: int = Field(ge=1)
    """How many trials (in a live run: steps) the run may use, the evaluation of a batch run included."""
    library: Literal["sb3", "rllib"] = "sb3"
    """Whose algorithm: Stable-Baselines3 (extra `rl`) or RLlib (extra `ray`)."""
    learning_rate: float | None = Field(default=None, gt=0)
    """The step size of learning; without it the library's own."""
    rollout: int | None = Field(default=None, ge=1)
    """How many trials are collected before the policy is updated."""
    hidden: tuple[int, ...] = (64, 64)
    """The layers of the policy's network."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Anything else that the library's algorithm takes, under its own names."""
    checkpoint_every: int = Field(default=1000, ge=1)
    """Trials between two checkpoints of the policy."""
    evaluate: int = Field(default=1, ge=0)
    """How often the policy, and the best static action, are measured under each regime at the end."""
    warm_start: str | None = None
    """The folder of an earlier run, relative to the scenario, whose trials the policy imitates first."""


@dataclass(frozen=True)
class Books:
    """What a learner must know of the run: where its policy lies, how many trials there were, what a step costs, and
    for how many steps of learning there is room in all.
    """

    directory: Path
    counted: Callable[[], int]
    flush: Callable[[], None]
    cost: int
    room: int

    def rollout(self, config: RlConfig) -> int:
        """How many steps are collected before an update where nothing else is said, if there is room for so many."""
        return min(2048, max(64, config.trials // self.cost // 20))


class Learner(ABC):
    """One library's algorithm at work on one environment."""

    def __init__(self, config: RlConfig, books: Books) -> None:
        self.config, self.books = config, books
        self._saved_at = books.counted()

    def checkpoint_if_due(self) -> None:
        """Save now and then; what was learned from is in the ledger before the policy that learned it."""
        if self.books.counted() - self._saved_at >= self.config.checkpoint_every:
            self._saved_at = self.books.counted()
            self.books.flush()
            self.save(self.books.directory)

    @abstractmethod
    def learn(self, until: int) -> None:
        """Train until the run has had this many trials."""

    @abstractmethod
    def act(self, observation: Any) -> Any:
        """The policy's own choice, without exploring."""

    @abstractmethod
    def imitate(self, pairs: list[tuple[Any, Any]]) -> None:
        """Warm start: learn to give these actions for these observations."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the policy down."""

    def close(self) -> None:
        """Let go of everything."""


class RlAgent(Agent):
    """Learns a policy from the regime in the observation to an action: with env_params it conditions on the regime that
    is drawn for the next trial, and is evaluated under each one.
    """

    samples_env_params: ClassVar[bool] = True
    conditions_on_regime: ClassVar[bool] = True
    steps_live: ClassVar[bool] = True
    algorithm: ClassVar[str]
    libraries: ClassVar[tuple[str, ...]] = ("sb3",)
    imitates: ClassVar[bool] = False
    """Whether the algorithm can learn to give recorded actions before it starts."""
    smallest: ClassVar[int] = 2
    """How many steps of each slot an update takes at least."""
    acts_in: ClassVar[tuple[str, ...]] = ("Discrete", "MultiDiscrete", "MultiBinary", "Box")
    """The action spaces that it takes from a live server."""
    config: RlConfig
    env: Any

    def __init__(self, env: Any, config: RlConfig, *, parallel: int = 1) -> None:
        super().__init__(env, config, parallel=parallel)
        self._learner: Learner | None = None

    @classmethod
    def problems(cls, config: RlConfig, space: Any, home: Path) -> list[Problem]:
        """`space` is that of a workload, or a live server's action space as far as it is known."""
        found = []
        if config.library not in cls.libraries:
            others = ", ".join(cls.libraries)
            found.append(Problem("library", f"{config.type!r} comes from {others}, not from {config.library!r}."))
        needed, extra = ("stable_baselines3", "rl") if config.library == "sb3" else ("ray", "ray")
        if not all(map(_installed, (needed, "gymnasium", "torch"))):
            found.append(Problem("library", str(MissingExtra(f"agent {config.type!r}", extra))))
        if not config.count_cached:
            found.append(Problem("count_cached", "a policy learns from cached trials too, so they count; remove it."))
        if config.warm_start is not None:
            found += cls._cold(config, space, home)
        if config.options and not found:
            found += cls._unknown(config)
        if isinstance(space, Space):
            return [*found, *cls.unfit(config, space)]
        if space is not None and (reason := cls.unable(space)):
            found.append(Problem("type", f"{reason}."))
        return found

    @classmethod
    def too_little(cls, config: RlConfig, space: Any, repeats: int = 1, parallel: int = 1) -> list[Problem]:
        """An evaluation that takes all there is, or a budget that is used up before the policy is updated once."""
        if space is None and config.rollout is None:
            return []
        needed = reserved(config, space, repeats) if isinstance(space, Space) else 0
        if needed >= config.trials:
            said = f"evaluating the policy takes {needed} of {config.trials}; raise it, or set evaluate = 0."
            return [Problem("trials", said)]
        # Of RLlib's last batch as much is collected as there is room for.
        slots = parallel if config.library == "sb3" else 1
        least = max((config.rollout or 1) if config.library == "sb3" else 1, cls.smallest * slots) * repeats
        if config.trials - needed >= least:
            return []
        left = f"{config.trials - needed} of {config.trials} are left to learn from"
        return [Problem("trials", f"{left}, and the first update of the policy takes {least}; raise it.")]

    @classmethod
    def _unknown(cls, config: RlConfig) -> list[Problem]:
        """Options that the library's algorithm does not take; asking it takes seconds, so only where there are some."""
        if config.library == "rllib":
            from loopwright.agents.rl.rllib_ray import option_names
        else:
            from loopwright.agents.rl.sb3 import option_names
        known = option_names(cls.algorithm)
        return [
            Problem("options", f"{config.type!r} of {config.library} takes no {name!r}. {did_you_mean(name, known)}")
            for name in config.options
            if name not in known
        ]

    @classmethod
    def unable(cls, action_space: Any) -> str | None:
        """Why this algorithm cannot act on a live server."""
        kind = type(action_space).__name__
        if kind in cls.acts_in:
            return None
        return f"{cls.algorithm.lower()!r} acts in {', '.join(cls.acts_in)}; the server has a {kind}"

    @classmethod
    def _cold(cls, config: RlConfig, space: Any, home: Path) -> list[Problem]:
        """Why a policy cannot be warmed up."""
        if not isinstance(space, Space):
            return [Problem("warm_start", "a live policy starts cold: the steps of another run are not its own.")]
        if not cls.imitates or config.library != "sb3":
            able = "ppo and a2c with library = 'sb3' do"
            return [Problem("warm_start", f"{config.type!r} of {config.library} does not imitate; {able}.")]
        if not (home / config.warm_start / "ledger.db").is_file():  # type: ignore[operator]
            return [Problem("warm_start", f"there is no ledger.db in {home / str(config.warm_start)}.")]
        return []

    @classmethod
    def unfit(cls, config: RlConfig, space: Space) -> list[Problem]:
        """Why this algorithm cannot act in this space."""
        return []

    @classmethod
    def view(cls) -> Literal["flat", "discrete"]:
        """How the algorithm sees the actions of a batch run."""
        return "flat"

    def select_action(self, observation: Observation) -> Action | None:
        """Not asked: the library's loop acts by itself."""
        return None

    def restore(self, history: Iterable[Proposal]) -> None:
        """Nothing: what was learned is in the policy's checkpoint."""

    def run(self) -> int:
        """Train, evaluate, save. A training that fails is a code; the other runs of the scenario go on."""
        from loopwright.agents.rl.session import train

        try:
            return train(self)
        except StorageError:
            raise
        except LoopwrightError as error:
            # It says by itself what is wrong; where in our code that showed is of no use.
            said = f"lost (infra): {error}" if isinstance(error, ServerLost) else sentence(error)
            log.error("the training of run %r failed: %s; go on with `loopwright resume`", self.env.run.name, error)
        except Exception as error:
            said = "".join(traceback.format_exception(error))
            log.exception("the training of run %r failed; go on with `loopwright resume`", self.env.run.name)
        self.env.run.ledger.set_state("failure", said)
        return 1

    def shutdown(self) -> None:
        if self._learner is not None:
            self._learner.close()
            self._learner = None

    @property
    def live(self) -> bool:
        """Whether a server steps the environment."""
        return isinstance(self.env, LiveEnv)


def _installed(module: str) -> bool:
    # Not imported: that takes seconds. A finder may refuse instead of finding nothing.
    with suppress(ImportError, ValueError):
        return find_spec(module) is not None
    return False


def reserved(config: RlConfig, space: Space, repeats: int) -> int:
    """How many trials the evaluation takes: policy and best static action, under each regime."""
    return 2 * config.evaluate * regime_count(space) * repeats


def regime_count(space: Space) -> int:
    """How many regimes a policy is evaluated under: all that can be drawn, or none if they are too many."""
    count = prod(space.parameters[name].size or 1 for name in space.drawn if name in space.parameters)
    return count if count <= MOST_REGIMES else 0


class PpoConfig(RlConfig):
    """Proximal policy optimisation: a good first choice, for every space."""

    type: Literal["ppo"] = "ppo"


class A2cConfig(RlConfig):
    """Advantage actor-critic: simpler than PPO, for every space."""

    type: Literal["a2c"] = "a2c"


class DqnConfig(RlConfig):
    """Deep Q-learning: for spaces of a few thousand points at most."""

    type: Literal["dqn"] = "dqn"


class SacConfig(RlConfig):
    """Soft actor-critic: for spaces with at least one range."""

    type: Literal["sac"] = "sac"


class Ppo(RlAgent):
    """Conditions on the drawn regime."""

    Config: ClassVar[type[AgentConfig]] = PpoConfig
    algorithm: ClassVar[str] = "PPO"
    counterpart: ClassVar[str | None] = "loopwright.trainers.ppo:Ppo"
    imitates: ClassVar[bool] = True
    libraries: ClassVar[tuple[str, ...]] = ("sb3", "rllib")


class A2c(RlAgent):
    """Conditions on the drawn regime."""

    Config: ClassVar[type[AgentConfig]] = A2cConfig
    algorithm: ClassVar[str] = "A2C"
    imitates: ClassVar[bool] = True


class Dqn(RlAgent):
    """Conditions on the drawn regime; numbers the points of the space."""

    Config: ClassVar[type[AgentConfig]] = DqnConfig
    algorithm: ClassVar[str] = "DQN"
    smallest: ClassVar[int] = 4
    acts_in: ClassVar[tuple[str, ...]] = ("Discrete",)
    libraries: ClassVar[tuple[str, ...]] = ("sb3", "rllib")

    @classmethod
    def unfit(cls, config: RlConfig, space: Space) -> list[Problem]:
        if prod(len(parameter.grid()) for parameter in space.tunable.values()) in range(1, MOST_POINTS + 1):
            return []
        return [
            Problem("type", f"'dqn' needs lists of at most {MOST_POINTS} points together; use ppo, or list values.")
        ]

    @classmethod
    def view(cls) -> Literal["flat", "discrete"]:
        return "discrete"


class Sac(RlAgent):
    """Conditions on the drawn regime."""

    Config: ClassVar[type[AgentConfig]] = SacConfig
    algorithm: ClassVar[str] = "SAC"
    acts_in: ClassVar[tuple[str, ...]] = ("Box",)

    @classmethod
    def unfit(cls, config: RlConfig, space: Space) -> list[Problem]:
        if any(isinstance(parameter, Range) for parameter in space.tunable.values()):
            return []
        return [Problem("type", "'sac' needs a range among the arguments; use ppo or dqn for lists.")]
