"""A contextual bandit: learns which action is best under which regime, by Thompson sampling."""

from collections import defaultdict
from math import sqrt
from random import Random
from typing import Any, ClassVar, Literal

from pydantic import Field

from loopwright.agents.search.base import BudgetedConfig, SpaceAgent
from loopwright.core.agent import AgentConfig
from loopwright.core.errors import Problem
from loopwright.core.trial import Action, Feedback, Observation, key_of
from loopwright.envs.search import SearchEnv
from loopwright.spaces.space import Space


class BanditConfig(BudgetedConfig):
    """A contextual bandit: repeats the action that looks best under the drawn regime."""

    type: Literal["bandit"] = "bandit"
    arms: int = Field(default=64, ge=2)
    """How many actions compete: all points of the grid if they are not more, otherwise random ones."""


class _Pulls:
    """The rewards of an arm under a regime."""

    __slots__ = ("n", "squares", "total")

    def __init__(self) -> None:
        self.n, self.total, self.squares = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        self.n, self.total, self.squares = self.n + 1, self.total + value, self.squares + value * value

    @property
    def scatter(self) -> float:
        """The sum of squared distances from the mean."""
        return max(self.squares - self.total**2 / self.n, 0.0) if self.n else 0.0


class Bandit(SpaceAgent):
    """Before each trial it draws, for every arm, a plausible mean reward under the observed regime. For an untried arm,
    any reward seen under that regime is plausible; each measurement narrows that down, more so if repeats vary little.
    The arm with the best draw is measured, also if it was measured before. Where the trials suffice to try every arm
    under every regime twice, untried arms come first.
    """

    Config: ClassVar[type[AgentConfig]] = BanditConfig
    samples_env_params: ClassVar[bool] = True
    conditions_on_regime: ClassVar[bool] = True
    measures_again: ClassVar[bool] = True
    confirms: ClassVar[bool] = True

    @classmethod
    def hints(cls, config: Any, space: Space, regimes: int) -> list[Problem]:
        arms = min(config.arms, space.size or config.arms)
        if config.trials >= arms * regimes:
            return []
        pairs = f"{arms} arms under {regimes} regimes" if regimes > 1 else f"{arms} arms"
        reason = f"{config.trials} cannot try each of {pairs} once; give at least {arms * regimes}, or fewer `arms`."
        return [Problem("[run.agent] trials", reason)]

    def __init__(self, env: SearchEnv, config: Any, *, parallel: int = 1) -> None:
        super().__init__(env, config, parallel=parallel)
        size = self.space.size
        if size is not None and size <= config.arms and self.space.enumerable:
            candidates = list(self.space.points())
        else:
            candidates = [self.space.sample(config.seed, f"arm:{index}") for index in range(config.arms)]
        self._arms = {key_of(action): action for action in [*self._start, *candidates]}
        self._pulls: dict[tuple[str, str], _Pulls] = defaultdict(_Pulls)
        self._by_regime: dict[str, _Pulls] = defaultdict(_Pulls)
        self._extremes: dict[str, tuple[float, float]] = {}
        self._tries_all = config.trials >= 2 * len(self._arms) * env.draws.count * env.rules.repeats

    def propose(self, n: int, retry: int, observation: Observation) -> Action | None:
        random = Random(f"{self.config.seed}:bandit:{n}:{retry}")
        regime = key_of(observation.context)
        alive = [arm for arm, action in self._arms.items() if not self.has_failed(action, observation.context)]
        if self.space.constraints:
            alive = [arm for arm in alive if not self.space.violated(self._arms[arm], observation.context)]
        if self._tries_all and (untried := [arm for arm in alive if not self._pulls[arm, regime].n]):
            return self._arms[random.choice(untried)]
        # The variance of repeats under the regime; without repeats, the spread of all rewards there.
        repeated = [self._pulls[arm, regime] for arm in self._arms if self._pulls[arm, regime].n > 1]
        freedom = sum(pulls.n - 1 for pulls in repeated)
        noise = sum(pulls.scatter for pulls in repeated) / freedom if freedom else self._width(regime) ** 2
        return self._arms[max(alive, key=lambda arm: self._plausible(arm, regime, noise, random))] if alive else None

    def _width(self, regime: str) -> float:
        low, high = self._extremes.get(regime, (0.0, 0.0))
        return (high - low) / 2 or 1.0

    def _plausible(self, arm: str, regime: str, noise: float, random: Random) -> float:
        regime_pulls, here, width = self._by_regime[regime], self._pulls[arm, regime], self._width(regime)
        if not here.n:
            return random.gauss(regime_pulls.total / regime_pulls.n if regime_pulls.n else 0.0, width)
        # Two sources: the noise of repeats, and the doubt that few measurements leave, which fades faster.
        variance = noise / here.n + (width / (2 * (here.n + 1))) ** 2
        return random.gauss(here.total / here.n, sqrt(variance))

    def learn(self, feedback: Feedback) -> None:
        if feedback.values is None:
            return
        value, arm, regime = feedback.values[0], key_of(feedback.action), key_of(feedback.regime)
        self._pulls[arm, regime].add(value)
        self._by_regime[regime].add(value)
        low, high = self._extremes.get(regime, (value, value))
        self._extremes[regime] = min(low, value), max(high, value)
