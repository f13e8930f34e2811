"""RL agents: a policy that learns on any run, batch or live, with a library's algorithm and training loop."""

import logging
import traceback
from contextlib import suppress
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Literal

from loopwright.agents.rl.learner import RlAlgorithm, RlConfig, backend
from loopwright.agents.search.warm_start import warm_start_problem
from loopwright.core.agent import Agent, AgentConfig
from loopwright.core.errors import LoopwrightError, MissingExtra, Problem, StorageError, did_you_mean, sentence
from loopwright.core.imports import import_object, look_first_in
from loopwright.envs.live.server import ServerLost
from loopwright.reports.curves import missing_packages
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
        algorithm = cls.algorithm_of(config)
        if config.library not in algorithm.libraries:
            libraries = " or ".join(map(repr, algorithm.libraries))
            problems.append(Problem("library", f"{config.type!r} needs {libraries}, not {config.library!r}."))
        package, extra = ("stable_baselines3", "rl") if config.library == "sb3" else ("ray", "ray")
        if not all(map(is_installed, (package, "gymnasium", "torch"))):
            problems.append(Problem("type", str(MissingExtra(f"agent {config.type!r}", extra))))
        if not config.count_cached:
            problems.append(
                Problem("count_cached", "a policy learns from cached trials too, so they count; remove it.")
            )
        if missing := missing_packages(config.log):
            problems.append(Problem("log", f"is not installed. Run: pip install {' '.join(missing)}"))
        if config.normalize and config.library != "sb3":
            problems.append(Problem("normalize", "needs library = 'sb3'; remove it."))
        if len({*config.seeds}) < len(config.seeds):
            problems.append(Problem("seeds", "has a seed twice; give different ones."))
        if config.warm_start is not None and (reason := cls._warm_start_problem(config, space, home)):
            problems.append(Problem("warm_start", reason))
        # Importing the library takes seconds, so only if there is something to check.
        if not problems and (config.options or config.policy or ":" in algorithm.name):
            problems += _library_problems(config, algorithm.name, home)
        if isinstance(space, Space):
            reason = cls.space_problem(space)
        else:
            reason = None if space is None else algorithm.action_space_problem(space, config.library)
        return [*problems, Problem("type", f"{reason}.")] if reason else problems

    @classmethod
    def algorithm_of(cls, config: RlConfig) -> RlAlgorithm:
        """The algorithm of a run."""
        return cls.algorithm

    @classmethod
    def observation_problem(cls, observation_space: Any) -> str | None:
        from loopwright.agents.rl.library_spaces import space_problem  # requires gymnasium

        return space_problem(observation_space, "the observation space")

    @classmethod
    def too_little(
        cls, config: RlConfig, space: Any, repeats: int = 1, parallel: int = 1, episode_trials: int = 1
    ) -> list[Problem]:
        """A budget that the evaluation uses up, or that ends before the first update of the policy."""
        if space is None and config.rollout is None:
            return []
        evaluation = config.evaluation_trials(space, episode_trials) if isinstance(space, Space) else 0
        training = config.trials - evaluation
        if training <= 0:
            reason = f"evaluating the policy takes {evaluation} of {config.trials}; raise it, or set evaluate = 0."
            return [Problem("trials", reason)]
        # RLlib shortens its last batch to the rest of the budget.
        slots = parallel if config.library == "sb3" else 1
        rollout = (config.rollout or 1) if config.library == "sb3" else 1
        required = max(rollout, cls.algorithm_of(config).min_update_steps * slots) * repeats
        if training >= required:
            return []
        reason = f"{training} of {config.trials} remain for training, but the first update of the policy needs"
        return [Problem("trials", f"{reason} {required}; raise it.")]

    @classmethod
    def _warm_start_problem(cls, config: RlConfig, space: Any, home: Path) -> str | None:
        if not isinstance(space, Space):
            return "not supported in a live run: the steps of another run do not fit it; remove it."
        if not cls.algorithm_of(config).can_imitate or config.library != "sb3":
            return f"{config.type!r} of {config.library} cannot imitate; use ppo or a2c with library = 'sb3'."
        return warm_start_problem(str(config.warm_start), home)

    @classmethod
    def space_problem(cls, space: Space) -> str | None:
        """Why the algorithm cannot act in the space of a workload."""
        return None

    def run(self) -> int:
        """Train, evaluate and save. A failed training returns 1, so that the other runs of the scenario still start."""
        from loopwright.agents.rl.training import train  # requires gymnasium

        try:
            train(self.env, self.config, self.algorithm_of(self.config), slots=self.parallel)
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


def _library_problems(config: RlConfig, algorithm: str, home: Path) -> list[Problem]:
    """What the library says about the algorithm, its options and its policy."""
    library = backend(config.library)
    look_first_in(home)
    try:
        options = library.option_names(algorithm)
    except LoopwrightError as error:
        return [Problem("algorithm", sentence(error))]
    problems = [
        Problem("options", f"unknown option {name!r} of {algorithm}. {did_you_mean(name, options)}")
        for name in config.options
        if name not in options
    ]
    problems += [Problem(key, reason) for key, reason in library.option_problems(algorithm, config)]
    if config.policy is None:
        return problems
    names = library.policy_names(algorithm)
    if not names:
        problems.append(
            Problem("policy", f"{config.library!r} chooses its network by the observation space; remove it.")
        )
    elif ":" not in config.policy and config.policy not in names:
        problems.append(Problem("policy", f"unknown policy {config.policy!r}. {did_you_mean(config.policy, names)}"))
    elif ":" in config.policy:
        try:
            import_object(config.policy)
        except (ImportError, ValueError) as error:
            problems.append(Problem("policy", f"{config.policy!r}: {error}."))
    return problems


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


class Td3Config(RlConfig):
    """Twin delayed DDPG: for spaces with at least one range; deterministic, with noise for exploration."""

    type: Literal["td3"] = "td3"


class MaskablePpoConfig(RlConfig):
    """PPO that never chooses an action that the environment masks, by `action_masks()` or `info["action_mask"]`."""

    type: Literal["maskable_ppo"] = "maskable_ppo"


class Sb3Config(RlConfig):
    """Any algorithm built on Stable-Baselines3."""

    type: Literal["sb3"] = "sb3"
    algorithm: str
    """Its class, such as `sb3_contrib:RecurrentPPO`, or `module:Class` beside the scenario."""


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
        return f"{cls.algorithm.name.lower()!r} needs a range among the arguments; use ppo or dqn for lists"


class Td3(Sac):
    """Conditions on the drawn regime."""

    Config: ClassVar[type[AgentConfig]] = Td3Config
    algorithm = RlAlgorithm("TD3", action_spaces=("Box",))


class MaskablePpo(RlAgent):
    """Conditions on the drawn regime."""

    Config: ClassVar[type[AgentConfig]] = MaskablePpoConfig
    algorithm = RlAlgorithm("MaskablePPO", action_spaces=("Discrete", "MultiDiscrete", "MultiBinary"), masks=True)

    @classmethod
    def space_problem(cls, space: Space) -> str | None:
        return "'maskable_ppo' is for live runs, whose environment masks actions; use ppo and `constraints` here"


class Sb3(RlAgent):
    """Conditions on the drawn regime."""

    Config: ClassVar[type[AgentConfig]] = Sb3Config

    @classmethod
    def algorithm_of(cls, config: RlConfig) -> RlAlgorithm:
        assert isinstance(config, Sb3Config)  # noqa: S101  its own Config
        return RlAlgorithm(config.algorithm)
