"""The contract of every search agent, as tests over a real environment and a real ledger.

class TestMine(AgentContract):
    agent_type = "mine"
    options = {"temperature": 0.5}
"""
# ruff: noqa: S101  These are tests.

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest

from loopwright.agents import agents
from loopwright.core.agent import Agent
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Identity, Objectives, Penalties, Trial, canonical, key_of
from loopwright.envs.search import SearchEnv, TrialRules
from loopwright.execution.local.system import LocalSystem
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.trial_book import Observer, TrialBook
from loopwright.spaces.space import Draws, EnvParamConfig, Space
from loopwright.testing.workloads import FunctionWorkload
from loopwright.workloads.base import Site, WorkloadConfig

Function = Callable[..., Any]


@dataclass
class Campaign:
    """One run of an agent over a function, configured like a scenario."""

    directory: Path
    agent: type[Agent]
    config: Mapping[str, Any]
    args: Mapping[str, Any]
    function: Function
    parallel: int = 1
    objectives: tuple[str, ...] = ("y",)
    env_params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    penalties: Penalties = field(default_factory=Penalties)
    observers: tuple[Observer, ...] = ()
    constraints: tuple[str, ...] = ()

    @property
    def space(self) -> Space:
        """The space of the search."""
        config = WorkloadConfig(type="function", args=dict(self.args), constraints=self.constraints)
        return config.space(frozenset(self.env_params))

    def run(self) -> list[Trial]:
        """Run it, or continue where it was stopped; returns all its trials so far."""
        return self.drive()[1]

    def drive(self, shutdowns: int = 1) -> tuple[int, list[Trial]]:
        """The agent's return code, and the trials."""
        config = self.agent.Config.model_validate(dict(self.config))
        path = self.directory / "ledger.db"
        self.directory.mkdir(parents=True, exist_ok=True)
        with Ledger.open(path) if path.exists() else Ledger.create(path, state={"id": "contract"}) as ledger:
            book = TrialBook("contract", self.directory, ledger, budget=config.trials, observers=self.observers)
            agent = self.agent(self._env(book, config.seed), config, parallel=self.parallel)
            try:
                code = agent.run()
            finally:
                for _ in range(shutdowns):
                    agent.shutdown()
            return code, list(ledger.trials())

    def _env(self, book: TrialBook, seed: int) -> SearchEnv:
        space = self.space
        configs = {name: EnvParamConfig.model_validate(dict(table)) for name, table in self.env_params.items()}
        self.draws = Draws(seed, space.parameters, configs)
        site = Site(scenario_dir=self.directory, directory=self.directory, system=LocalSystem(parallel=self.parallel))
        stoppers = [observer for observer in self.observers if isinstance(observer, StopAfter)]
        for stopper in stoppers:
            stopper.book = book
        return SearchEnv(
            book,
            space=space,
            workload=FunctionWorkload(self.function, site),
            draws=self.draws,
            objectives=Objectives(tuple(Identity(metrics=(name,)) for name in self.objectives)),
            metric_names=self.objectives,
            rules=TrialRules(self.penalties),
        )


class StopAfter(Observer):
    """Stops the run after a trial, like a user's Ctrl-C."""

    book: TrialBook

    def __init__(self, number: int) -> None:
        self.number = number

    def after(self, trial: Trial) -> None:
        if trial.number == self.number:
            self.book.stop()


class AgentContract:
    """Subclass it, name the subclass `Test…`, and set `agent_type`."""

    agent_type: ClassVar[str]
    """The name under which the agent is registered."""
    options: ClassVar[Mapping[str, Any]] = {}
    """More settings of the agent in its tests, as in `[run.agent]`."""
    trials: ClassVar[int] = 12
    """The budget; enough for the agent to get past its first, random proposals."""
    space: ClassVar[Mapping[str, Any]] = {
        "x": {"low": -1.0, "high": 1.0, "points": 3},
        "n": {"low": 1, "high": 64, "dtype": "int", "log": True, "points": 3},
        "mode": ["a", "b", "c"],
    }
    """The space, as in `[run.workload.args]`; the tests measure `x`, `n` and `mode`."""

    @classmethod
    def campaign(cls, directory: Path, function: Function | None = None, **changes: Any) -> Campaign:
        """A run of the agent under test."""
        config = {"type": cls.agent_type, "trials": cls.trials, "seed": 7, **cls.options, **changes.pop("config", {})}
        args = changes.pop("args", cls.space)
        return Campaign(directory, agents.get(cls.agent_type), config, args, function or measured, **changes)

    def test_its_documentation_says_what_it_does(self) -> None:
        """`loopwright list agents` shows the first line of its configuration."""
        assert (agents.get(self.agent_type).Config.__doc__ or "").strip()

    @pytest.fixture(scope="class")
    @classmethod
    def undisturbed(cls, tmp_path_factory: pytest.TempPathFactory) -> list[Trial]:
        """The trials of a run from beginning to end."""
        return cls.campaign(tmp_path_factory.mktemp("undisturbed")).run()

    def test_every_proposal_lies_in_the_space(self, tmp_path: Path, undisturbed: list[Trial]) -> None:
        """No trial is wasted on what the environment must refuse."""
        space = self.campaign(tmp_path).space
        assert {trial.outcome for trial in undisturbed} == {Outcome.OK}
        assert [space.validate(trial.action) for trial in undisturbed] == [trial.action for trial in undisturbed]

    def test_the_budget_is_kept(self, undisturbed: list[Trial]) -> None:
        """As many trials as were allowed, numbered without a gap."""
        assert [trial.number for trial in undisturbed] == list(range(1, self.trials + 1))

    def test_the_same_seed_gives_the_same_proposals(self, tmp_path: Path, undisturbed: list[Trial]) -> None:
        """A search is reproducible."""
        code, repeated = self.campaign(tmp_path).drive()
        assert code == 0
        assert actions(repeated) == actions(undisturbed)

    def test_a_stopped_run_continues_as_if_it_had_not_been(self, tmp_path: Path, undisturbed: list[Trial]) -> None:
        """Stopped several times and rebuilt from its ledger alone, the agent makes the same proposals."""
        for after in (1, self.trials // 2, self.trials - 1):
            assert len(self.campaign(tmp_path, observers=(StopAfter(after),)).run()) == after
        assert actions(self.campaign(tmp_path).run()) == actions(undisturbed)

    def test_a_trial_that_was_interrupted_is_run_again_under_its_number(
        self, tmp_path: Path, undisturbed: list[Trial]
    ) -> None:
        """A stop in the middle of a trial does not change the search either."""
        stop, calls = StopAfter(0), count(1)

        async def interrupted(**arguments: Any) -> dict[str, float]:
            if next(calls) == 4:
                stop.book.stop()
                await asyncio.Event().wait()
            return measured(**arguments)

        stopped = self.campaign(tmp_path, interrupted, observers=(stop,)).run()
        assert stopped[-1].outcome is Outcome.ABORTED
        resumed = self.campaign(tmp_path).run()
        assert resumed[len(stopped) - 1].outcome is Outcome.OK
        assert actions(resumed) == actions(undisturbed)

    @pytest.mark.parametrize("landscape", ["a third fails", "all but one point fail"])
    def test_a_stopped_run_continues_past_failures(self, tmp_path: Path, landscape: str) -> None:
        """Failures before the stop are remembered after it, and rewards belong to the same points."""
        function = failing_in_b if landscape == "a third fails" else failing_but_in_c3
        undisturbed = self.campaign(tmp_path / "one", function, args=SMALL).run()
        for after in (len(undisturbed) // 2, len(undisturbed) - 1):
            self.campaign(tmp_path / "two", function, args=SMALL, observers=(StopAfter(after),)).run()
        assert actions(self.campaign(tmp_path / "two", function, args=SMALL).run()) == actions(undisturbed)

    def test_a_point_that_failed_is_not_proposed_again(self, tmp_path: Path) -> None:
        """In a small space, where every agent proposes points again."""
        trials = self.campaign(tmp_path, failing_in_b, args=SMALL).run()
        failed = [key_of(trial.action) for trial in trials if trial.outcome is Outcome.CRASHED]
        assert failed
        assert len(failed) == len(set(failed))

    def test_a_point_that_broke_a_constraint_is_not_proposed_again(self, tmp_path: Path) -> None:
        """The agent treats it like any other failure, and continues."""
        trials = self.campaign(tmp_path, args=SMALL, constraints=("n != 2",)).run()
        broken = [key_of(trial.action) for trial in trials if trial.outcome is Outcome.INFEASIBLE]
        assert len(broken) == len(set(broken))
        assert Outcome.OK in {trial.outcome for trial in trials}

    def test_a_run_in_which_everything_fails_ends_in_good_order(self, tmp_path: Path) -> None:
        """Each point at most once, no reward, no metrics, no exception."""
        code, trials = self.campaign(tmp_path, lambda **_: 1 / 0, args=SMALL).drive()
        assert code == 0
        assert {trial.outcome for trial in trials} == {Outcome.CRASHED}
        assert [(trial.reward, dict(trial.metrics)) for trial in trials] == [(None, {})] * len(trials)
        assert len({key_of(trial.action) for trial in trials}) == len(trials) <= self.trials

    def test_a_penalty_reaches_the_agent_and_is_never_a_reward(self, tmp_path: Path) -> None:
        """The search continues with the penalty; the ledger has no reward."""
        trials = self.campaign(tmp_path, failing_in_b, penalties=Penalties(metric_failure=-50.0)).run()
        assert len(trials) == self.trials
        assert {trial.reward for trial in trials if trial.outcome is not Outcome.OK} <= {None}

    def test_several_objectives(self, tmp_path: Path) -> None:
        """With two objectives, the agent gets both, and stays within its budget."""
        if not agents.get(self.agent_type).several_objectives:
            pytest.skip(f"{self.agent_type} declares one objective")
        trials = self.campaign(tmp_path, objectives=("y", "z")).run()
        assert [len(trial.reward.objectives) for trial in trials if trial.reward] == [2] * self.trials

    def test_env_params(self, tmp_path: Path) -> None:
        """Drawn values reach the workload, and the agent never chooses them."""
        if not agents.get(self.agent_type).samples_env_params:
            pytest.skip(f"{self.agent_type} does not sample env_params")
        weathers: list[str] = []

        def under(weather: str, **point: Any) -> dict[str, float]:
            weathers.append(weather)
            return measured(**point)

        campaign = self.campaign(
            tmp_path, under, args={**self.space, "weather": ["sun", "rain"]}, env_params={"weather": {}}
        )
        trials = campaign.run()
        assert [trial.draw for trial in trials] == list(range(1, self.trials + 1))
        assert [trial.regime for trial in trials] == [campaign.draws.sample(trial.number) for trial in trials]
        assert weathers == [trial.regime["weather"] for trial in trials if trial.cached_from is None]
        assert not any("weather" in trial.action for trial in trials)

    def test_conditional_parameters(self, tmp_path: Path) -> None:
        """A parameter is part of an action exactly while its `when` holds."""
        args = {"mode": ["a", "b"], "n": [1, 2, 3], "depth": {"values": [10, 20, 30], "when": "mode == 'b'"}}
        trials = self.campaign(tmp_path, lambda **point: measured(**{"depth": 0, **point}), args=args).run()
        assert {trial.outcome for trial in trials} == {Outcome.OK}
        assert all(("depth" in trial.action) == (trial.action["mode"] == "b") for trial in trials)
        assert any("depth" in trial.action for trial in trials)

    def test_trials_in_flight_keep_their_numbers(self, tmp_path: Path) -> None:
        """Three at a time, which end in another order than they started."""
        turns = count()

        async def slowly(**arguments: Any) -> dict[str, float]:
            for _ in range(next(turns) * 7 % 5):
                await asyncio.sleep(0)
            return measured(**arguments)

        trials = self.campaign(tmp_path, slowly, parallel=3).run()
        assert [trial.number for trial in trials] == list(range(1, self.trials + 1))
        assert {trial.outcome for trial in trials} == {Outcome.OK}

    def test_shutdown_can_be_called_twice(self, tmp_path: Path) -> None:
        """Code that cleans up after a failure cannot know whether it was done before."""
        code, trials = self.campaign(tmp_path, config={"trials": 2}).drive(shutdowns=2)
        assert (code, len(trials)) == (0, 2)


SMALL: Mapping[str, Any] = {"mode": ["a", "b", "c"], "n": [1, 2, 3]}
"""Nine points, fewer than there are trials."""


def measured(x: float = 0.0, n: int = 1, mode: str = "a", **_: Any) -> dict[str, float]:
    """A landscape with a best point, and a second objective that pulls the other way."""
    height = 1.0 - (x - 0.3) ** 2 - (n / 64 - 0.5) ** 2 + {"a": 0.0, "b": 0.5, "c": 0.2}[mode]
    return {"y": height, "z": float(n)}


def failing_in_b(**point: Any) -> dict[str, float]:
    """The same landscape, where a third of it crashes."""
    if point["mode"] == "b":
        raise RuntimeError("mode b does not work here")
    return measured(**point)


def failing_but_in_c3(**point: Any) -> dict[str, float]:
    """A landscape where nearly every point crashes."""
    if point != {"mode": "c", "n": 3}:
        raise RuntimeError("does not work here")
    return measured(**point)


def actions(trials: list[Trial]) -> list[Any]:
    """The proposals, in order."""
    return [canonical(trial.action) for trial in trials]
