"""Agents that learn nothing: every point of a grid, and random points."""

from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal

from loopwright.agents.search.base import BudgetedConfig, SearchAgent, SearchConfig, SpaceAgent
from loopwright.core.agent import AgentConfig
from loopwright.core.errors import Problem
from loopwright.core.trial import Action, Observation, Proposal, key_of
from loopwright.envs.search import SearchEnv
from loopwright.spaces.space import Space


class GridConfig(SearchConfig):
    """Every point of the grid, once; ranges need `points`."""

    type: Literal["grid"] = "grid"


class RandomConfig(BudgetedConfig):
    """Independent random points."""

    type: Literal["random"] = "random"


class MemorylessAgent(SpaceAgent):
    """Continues a run from its failures alone, since successes teach it nothing."""

    def restore(self, history: Iterable[Proposal]) -> None:
        super().restore(self.env.history(without_successes=True))


class Grid(MemorylessAgent):
    """Visits every point of the grid once, the last parameter changing fastest."""

    Config: ClassVar[type[AgentConfig]] = GridConfig
    several_objectives: ClassVar[bool] = True

    def __init__(self, env: SearchEnv, config: Any, *, parallel: int = 1) -> None:
        super().__init__(env, config, parallel=parallel)
        pinned = {key_of(point) for point in self._start}
        points = self.space.points()
        self._points = (point for point in points if key_of(point) not in pinned) if pinned else points
        self._visited = len(self._start)

    @classmethod
    def problems(cls, config: Any, space: Space, home: Path) -> list[Problem]:
        problems = super().problems(config, space, home)
        for name, parameter in space.tunable.items():
            if not parameter.grid():
                problems.append(
                    Problem("type", f"a grid cannot visit the range {name!r}; give it `points`, or list values.")
                )
        return problems

    def propose(self, n: int, retry: int, observation: Observation) -> Action | None:
        # Counted, not stored: after a resume the iterator is advanced to where the grid stopped.
        point: Action | None = None
        while self._visited < n and (point := next(self._points, None)) is not None:
            self._visited += 1
        return point


class RandomSearch(MemorylessAgent):
    """Draws each point from (seed, n) alone. With env_params it ignores the regime, which gives an unbiased picture of
    every action under all regimes.
    """

    Config: ClassVar[type[AgentConfig]] = RandomConfig
    samples_env_params: ClassVar[bool] = True
    several_objectives: ClassVar[bool] = True
    steps_live: ClassVar[bool] = True
    confirms: ClassVar[bool] = True

    def propose(self, n: int, retry: int, observation: Observation) -> Action | None:
        return self.space.sample(self.config.seed, f"{n}:{retry}" if retry else n)


class RandomPolicy(SearchAgent):
    """`random` in a live run: samples the action space in each step, whatever it observes. A policy's baseline."""

    Config: ClassVar[type[AgentConfig]] = RandomConfig
    samples_env_params: ClassVar[bool] = True

    def __init__(self, env: Any, config: Any, *, parallel: int = 1) -> None:
        super().__init__(env, config, parallel=parallel)
        self._space = deepcopy(env.action_space)  # sampling must not advance the server's own random source
        self._space.seed(Random(f"{config.seed}:action:{env.book.step}").getrandbits(31))

    @classmethod
    def problems(cls, config: Any, space: Any, home: Path) -> list[Problem]:
        return [Problem("start", "has no meaning in a live run, whose first actions are random; remove it.")] * bool(
            config.start
        )

    def select_action(self, observation: Observation) -> Any:
        return self._space.sample()

    def restore(self, history: Iterable[Proposal]) -> None:
        """It learns nothing, so there is nothing to restore."""
