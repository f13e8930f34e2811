"""A contextual bandit: learns which action is best under which regime, by Thompson sampling."""

from collections import defaultdict
from math import sqrt
from random import Random
from typing import Any, ClassVar, Literal

from pydantic import Field

from loopwright.agents.search import BudgetedConfig, SearchAgent
from loopwright.core.agent import AgentConfig
from loopwright.core.canonical import key_of
from loopwright.core.trial import Action, Feedback, Observation
from loopwright.envs.trial import TrialEnv


class BanditConfig(BudgetedConfig):
    """A contextual bandit: measures again what looks best under the drawn regime."""

    type: Literal["bandit"] = "bandit"
    arms: int = Field(default=64, ge=2)
    """How many actions compete: all points of the grid if it has no more than that, otherwise that many random ones."""


class _Sum:
    """Count, sum and sum of squares of rewards."""

    __slots__ = ("n", "squares", "total")

    def __init__(self) -> None:
        self.n, self.total, self.squares = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        self.n, self.total, self.squares = self.n + 1, self.total + value, self.squares + value * value

    @property
    def mean(self) -> float:
        return self.total / self.n if self.n else 0.0

    @property
    def deviation(self) -> float:
        return sqrt(max(self.squares / self.n - self.mean**2, 0.0)) if self.n else 0.0


class Bandit(SearchAgent):
    """Before each trial it looks at the regime in the observation and draws, for every arm, a plausible mean reward
    under that regime: from the arm's own rewards there, leaning on its rewards under other regimes while these are few.
    The arm with the best draw is measured, afresh each time.
    """

    Config: ClassVar[type[AgentConfig]] = BanditConfig
    samples_env_params: ClassVar[bool] = True
    conditions_on_regime: ClassVar[bool] = True
    measures_again: ClassVar[bool] = True

    def __init__(self, env: TrialEnv, config: Any, *, parallel: int = 1) -> None:
        super().__init__(env, config, parallel=parallel)
        self._arms = {key_of(action): action for action in self._candidates()}
        self._everything = _Sum()
        self._by_arm: dict[str, _Sum] = defaultdict(_Sum)
        self._by_regime: dict[tuple[str, str], _Sum] = defaultdict(_Sum)

    def _candidates(self) -> list[Action]:
        size = self.space.size
        if size is not None and size <= self.config.arms and self.space.enumerable:
            return list(self.space.points())
        return [self.space.sample(self.config.seed, f"arm:{index}") for index in range(self.config.arms)]

    def propose(self, n: int, retry: int, observation: Observation) -> Action | None:
        random = Random(f"{self.config.seed}:bandit:{n}:{retry}")
        regime = key_of(observation.context)
        alive = [
            arm
            for arm, action in self._arms.items()
            if not self.has_failed(action, observation.context) and not self.space.violated(action, observation.context)
        ]
        return self._arms[max(alive, key=lambda arm: self._plausible(arm, regime, random))] if alive else None

    def _plausible(self, arm: str, regime: str, random: Random) -> float:
        noise = self._everything.deviation or 1.0
        here, elsewhere = self._by_regime[arm, regime], self._by_arm[arm]
        prior = elsewhere.mean if elsewhere.n else self._everything.mean
        # Rewards under other regimes count as at most one measurement under this one.
        weight = min(1.0, elsewhere.n)
        mean = (here.total + weight * prior) / (here.n + weight) if here.n + weight else prior
        return random.gauss(mean, noise / sqrt(max(here.n + weight, 0.5)))

    def learn(self, feedback: Feedback) -> None:
        if feedback.told is None:
            return
        arm, regime = key_of(feedback.action), key_of(feedback.regime)
        for total in (self._everything, self._by_arm[arm], self._by_regime[arm, regime]):
            total.add(feedback.told[0])
