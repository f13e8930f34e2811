"""What search agents share: pinned first trials, retries, warm starts, and invalid actions."""

import math
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from loopwright.agents import agents
from loopwright.agents.search.base import BudgetedConfig, SpaceAgent
from loopwright.core.outcome import Outcome
from loopwright.core.trial import key_of
from loopwright.spaces.parameter import parameter
from loopwright.spaces.space import Space
from loopwright.testing.agents import SMALL, Campaign, StopAfter, actions, failing_in_b, measured

SAMPLERS = ["tpe", "cmaes", "nsga2"]
ROOMY = {**SMALL, "x": {"low": -1.0, "high": 1.0}, "n": {"low": 1, "high": 64, "dtype": "int"}}


def campaign(
    directory: Path, agent: str, function=measured, *, args=SMALL, trials: int = 6, **options: Any
) -> Campaign:
    settings = {"type": agent, "trials": trials, "seed": 1, **options}
    return Campaign(directory, agents.get(agent), settings, args, function)


class TestPinnedFirstTrials:
    @pytest.mark.parametrize("agent", ["grid", "random", "bandit", *SAMPLERS])
    def test_come_first(self, tmp_path, agent):
        pinned = [{"mode": "c", "n": 2}, {"mode": "a", "n": 3}]
        assert actions(campaign(tmp_path, agent, start=pinned).run())[:2] == pinned

    def test_first_is_the_first_of_everything(self, tmp_path):
        assert actions(campaign(tmp_path, "random", start="first").run())[0] == {"mode": "a", "n": 1}

    @pytest.mark.parametrize("agent", ["grid", "random", *SAMPLERS])
    def test_that_fail_are_not_proposed_again(self, tmp_path, agent):
        pinned = [{"mode": "b", "n": 2}, {"mode": "b", "n": 1}]
        trials = campaign(tmp_path, agent, failing_in_b, trials=9, start=pinned).run()
        failed = [key_of(trial.action) for trial in trials if trial.outcome is not Outcome.OK]
        assert len(failed) == len(set(failed))

    def test_are_not_visited_again_by_a_grid(self, tmp_path):
        trials = campaign(tmp_path, "grid", trials=99, start=[{"mode": "b", "n": 2}]).run()
        assert len(trials) == len({key_of(trial.action) for trial in trials}) == 9

    def test_survive_an_interruption(self, tmp_path):
        pinned = [{"mode": "c", "n": n} for n in (1, 2, 3)]
        undisturbed = campaign(tmp_path / "one", "tpe", start=pinned).run()
        stopped = campaign(tmp_path / "two", "tpe", start=pinned)
        stopped.observers = (StopAfter(2),)
        stopped.run()
        assert actions(campaign(tmp_path / "two", "tpe", start=pinned).run()) == actions(undisturbed)

    def test_outside_the_space_are_a_problem_at_load_time(self, tmp_path):
        config = agents.get("tpe").Config(trials=5, start=({"x": 1}, {"x": 9}))
        space = Space({"x": parameter([1, 2])})
        (problem,) = agents.get("tpe").problems(config, space, tmp_path)
        assert (problem.key, problem.message) == ("start[1]", "x: 9 is not one of 1, 2.")


class TestAWarmStart:
    @pytest.mark.parametrize("agent", SAMPLERS)
    def test_changes_what_is_proposed_without_using_up_trials(self, tmp_path, agent):
        earlier = campaign(tmp_path / "warm" / "earlier", "random", args=ROOMY, trials=9).run()
        few = {"population": 4} if agent == "nsga2" else {"startup": 1}
        cold, warm = (
            campaign(tmp_path / name, agent, args=ROOMY, **few, **more).run()
            for name, more in (("cold", {}), ("warm", {"warm_start": "earlier"}))
        )
        assert (len(earlier), len(warm)) == (9, 6)
        assert {trial.outcome for trial in warm} == {Outcome.OK}
        assert actions(cold) != actions(warm)

    def test_leaves_out_trials_that_do_not_fit(self, tmp_path):
        campaign(tmp_path / "earlier", "random", args={**SMALL, "n": [1, 2, 3, 4]}, trials=9).run()
        assert len(campaign(tmp_path, "tpe", warm_start="earlier").run()) == 6

    def test_from_a_missing_run_is_a_problem_at_load_time(self, tmp_path):
        config = agents.get("tpe").Config(trials=5, warm_start="nowhere")
        (problem,) = agents.get("tpe").problems(config, Space({"x": parameter([1, 2])}), tmp_path)
        assert problem.key == "warm_start"


class StubbornConfig(BudgetedConfig):
    """Proposes one thing only."""

    type: Literal["stubborn"] = "stubborn"
    proposal: Any = None


class Stubborn(SpaceAgent):
    Config: ClassVar = StubbornConfig

    def propose(self, n, retry, observation):
        return self.config.proposal


class TestAnAgentWithInvalidProposals:
    @pytest.mark.parametrize("x", [math.nan, "many", 99, None, 2**80, {1}, "\ud800"])
    def test_has_invalid_trials_and_continues(self, tmp_path, x):
        """One invalid trial, since a failed point is not proposed again; then a valid one."""
        settings = {"type": "stubborn", "trials": 3, "proposal": {"n": x, "mode": "a"}}
        trials = Campaign(tmp_path, Stubborn, settings, SMALL, measured).run()
        assert [trial.outcome for trial in trials] == ["invalid", "ok", "ok"]
        assert trials[0].reason


class TestTheGrid:
    def test_visits_every_point_once(self, tmp_path):
        trials = campaign(tmp_path, "grid", trials=None).run()
        assert actions(trials) == [{"mode": mode, "n": n} for mode in "abc" for n in (1, 2, 3)]

    def test_needs_points_for_a_range(self, tmp_path):
        space = Space({"x": parameter({"low": 0, "high": 1})})
        (problem,) = agents.get("grid").problems(agents.get("grid").Config(), space, tmp_path)
        assert "a grid cannot visit the range 'x'; give it `points`" in problem.message


def test_the_bandit_tries_every_arm_where_its_trials_suffice(tmp_path):
    arms = len({key_of(action) for action in actions(campaign(tmp_path / "all", "grid", trials=99).run())})
    trials = campaign(tmp_path / "some", "bandit", trials=2 * arms).run()
    assert len({key_of(action) for action in actions(trials)[:arms]}) == arms


def test_the_bandit_learns_the_best_arm_of_each_regime(tmp_path):
    """Two regimes have opposite best arms."""

    best = {"sun": "hat", "rain": "umbrella"}

    def opposite(arm: str, weather: str) -> dict[str, float]:
        return {"y": float(arm == best[weather])}

    args = {"arm": ["hat", "umbrella", "scarf"], "weather": ["sun", "rain"]}
    finished = campaign(tmp_path, "bandit", opposite, args=args, trials=120)
    finished.env_params = {"weather": {}}
    late = finished.run()[60:]
    assert sum(trial.action["arm"] == best[trial.regime["weather"]] for trial in late) > 0.8 * len(late)


@pytest.mark.parametrize("agent", ["tpe", "cmaes"])
def test_a_sampler_beats_random_search(tmp_path, agent):
    def bowl(x: float, y: float) -> dict[str, float]:
        return {"y": -((x - 0.7) ** 2) - (y + 0.2) ** 2}

    args = {name: {"low": -10.0, "high": 10.0} for name in "xy"}
    trials = campaign(tmp_path, agent, bowl, args=args, trials=60).run()
    assert max(trial.reward.value for trial in trials) > -1.0
