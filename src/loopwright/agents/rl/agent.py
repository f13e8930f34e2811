"""RL agents: a policy that learns on any run, batch or live, with a library's algorithm and training loop."""

import logging
import traceback
from contextlib import suppress
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Literal

from loopwright.agents.rl.learner import RlAlgorithm, RlConfig, backend
from loopwright.core.agent import Agent, AgentConfig
from loopwright.core.errors import LoopwrightError, MissingExtra, Problem, StorageError, did_you_mean, sentence
from loopwright.envs.live.server import ServerLost
from loopwright.spaces.parameter import Range
from loopwright.spaces.space import Space

log = logging.getLogger(__name__)
MAX_POINTS = 4096
"""Above this many points, an algorithm that enumerates them learns nothing."""


class RlAgent(Agent):
    """Learns a policy that maps an observation to an action. With env_params the observation includes the regime of the
    next trial, and the policy is evaluated under every regime.
    """

    samples_env_params: ClassVar[bool] = True
    conditions_on_regime: ClassVar[bool] = True
    steps_live: ClassVar[bool] = True
    algorithm: ClassVar[RlAlgorithm]
    config: RlConfig
    env: Any

    @classmethod
    def problems(cls, config: RlConfig, space: Any, home: Path) -> list[Problem]:
        """`space` is a workload's space, or a live server's action space, None if it is not known yet."""
        problems = []
        if config.library not in cls.algorithm.libraries:
            libraries = " or ".join(map(repr, cls.algorithm.libraries))
            problems.append(Problem("library", f"{config.type!r} needs {libraries}, not {config.library!r}."))
        package, extra = ("stable_baselines3", "rl") if config.library == "sb3" else ("ray", "ray")
        if not all(map(is_installed, (package, "gymnasium", "torch"))):
            problems.append(Problem("library", str(MissingExtra(f"agent {config.type!r}", extra))))
        if not config.count_cached:
            problems.append(
                Problem("count_cached", "a policy learns from cached trials too, so they count; remove it.")
            )
        if config.warm_start is not None and (reason := cls._warm_start_problem(config, space, home)):
            problems.append(Problem("warm_start", reason))
        if config.options and not problems:
            # Importing the library takes seconds, so only if there are options to check.
            options = backend(config.library).option_names(cls.algorithm.name)
            problems += [
                Problem("options", f"unknown option {name!r} of {cls.algorithm.name}. {did_you_mean(name, options)}")
                for name in config.options
                if name not in options
            ]
        if isinstance(space, Space):
            reason = cls.space_problem(space)
        else:
            reason = None if space is None else cls.algorithm.action_space_problem(space)
        return [*problems, Problem("type", f"{reason}.")] if reason else problems

    @classmethod
    def too_little(cls, config: RlConfig, space: Any, repeats: int = 1, parallel: int = 1) -> list[Problem]:
        """A budget that the evaluation uses up, or that ends before the first update of the policy."""
        if space is None and config.rollout is None:
            return []
        evaluation = config.evaluation_trials(space, repeats) if isinstance(space, Space) else 0
        training = config.trials - evaluation
        if training <= 0:
            reason = f"evaluating the policy takes {evaluation} of {config.trials}; raise it, or set evaluate = 0."
            return [Problem("trials", reason)]
        # RLlib shortens its last batch to the rest of the budget.
        slots = parallel if config.library == "sb3" else 1
        rollout = (config.rollout or 1) if config.library == "sb3" else 1
        required = max(rollout, cls.algorithm.min_update_steps * slots) * repeats
        if training >= required:
            return []
        reason = f"{training} of {config.trials} remain for training, but the first update of the policy needs"
        return [Problem("trials", f"{reason} {required}; raise it.")]

    @classmethod
    def _warm_start_problem(cls, config: RlConfig, space: Any, home: Path) -> str | None:
        if not isinstance(space, Space):
            return "not supported in a live run: the steps of another run do not fit it; remove it."
        if not cls.algorithm.can_imitate or config.library != "sb3":
            return f"{config.type!r} of {config.library} cannot imitate; use ppo or a2c with library = 'sb3'."
        directory = home / str(config.warm_start)
        return None if (directory / "ledger.db").is_file() else f"there is no ledger.db in {directory}."

    @classmethod
    def space_problem(cls, space: Space) -> str | None:
        """Why the algorithm cannot act in the space of a workload."""
        return None

    def run(self) -> int:
        """Train, evaluate and save. A failed training returns 1, so that the other runs of the scenario still start."""
        from loopwright.agents.rl.training import train  # requires gymnasium

        try:
            train(self.env, self.config, self.algorithm, slots=self.parallel)
            return 0
        except StorageError:
            raise
        except LoopwrightError as error:
            # The message says what is wrong; a traceback of our code would not help.
            failure = f"lost (infra): {error}" if isinstance(error, ServerLost) else sentence(error)
            log.error("training of run %r failed: %s; continue with `loopwright resume`", self.env.book.name, error)
        except Exception as error:
            failure = "".join(traceback.format_exception(error))
            log.exception("training of run %r failed; continue with `loopwright resume`", self.env.book.name)
        self.env.book.ledger.set_state("failure", failure)
        return 1


def is_installed(module: str) -> bool:
    """Whether a module can be imported, without importing it."""
    with suppress(ImportError, ValueError):  # a finder may refuse
        return find_spec(module) is not None
    return False


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
    algorithm = RlAlgorithm("PPO", ("sb3", "rllib"), can_imitate=True)


class A2c(RlAgent):
    """Conditions on the drawn regime."""

    Config: ClassVar[type[AgentConfig]] = A2cConfig
    algorithm = RlAlgorithm("A2C", can_imitate=True)


class Dqn(RlAgent):
    """Conditions on the drawn regime; chooses a point of the grid by its index."""

    Config: ClassVar[type[AgentConfig]] = DqnConfig
    algorithm = RlAlgorithm("DQN", ("sb3", "rllib"), min_update_steps=4, action_spaces=("Discrete",), view="discrete")

    @classmethod
    def space_problem(cls, space: Space) -> str | None:
        if prod(len(parameter.grid()) for parameter in space.tunable.values()) in range(1, MAX_POINTS + 1):
            return None
        return f"'dqn' needs lists of at most {MAX_POINTS} points together; use ppo, or list values"


class Sac(RlAgent):
    """Conditions on the drawn regime."""

    Config: ClassVar[type[AgentConfig]] = SacConfig
    algorithm = RlAlgorithm("SAC", action_spaces=("Box",))

    @classmethod
    def space_problem(cls, space: Space) -> str | None:
        if any(isinstance(parameter, Range) for parameter in space.tunable.values()):
            return None
        return "'sac' needs a range among the arguments; use ppo or dqn for lists"
