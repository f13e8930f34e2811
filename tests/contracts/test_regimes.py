"""The contracts R01–R05, R07 and R08 of randomised environments, each named after its number."""

import json
from pathlib import Path
from typing import Any

import pytest

from loopwright.agents import agents
from loopwright.core.errors import ScenarioError
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Action, Observation
from loopwright.scenario.load import load
from loopwright.spaces.parameter import Choice
from loopwright.spaces.space import Draws, EnvParamConfig
from tests.contracts.harness import FunctionEnv, ListedAgent, campaign, scenario, trials

COMMAND = "echo y={x}{size}"


def with_draws(*more: str, agent: str = '{ type = "random", trials = 24, seed = 3 }', size: str = "[10, 20]") -> str:
    return scenario(agent, COMMAND, {"x": "[1, 2]", "size": size}, *(more or ("[run.env_params.size]",)))


def problem(directory: Path, text: str) -> str:
    (directory / "scenario.toml").write_text(text)
    with pytest.raises(ScenarioError) as raised:
        load(directory / "scenario.toml")
    return str(raised.value)


class Weather:
    """Draws a wind."""

    values = {"wind": Choice(values=(0, 1))}  # noqa: RUF012

    def sample(self, draw: int) -> dict[str, Any]:
        return {"wind": draw % 2}


def test_r01_the_same_action_is_measured_once_per_regime(tmp_path):
    assert campaign(tmp_path, with_draws()) == 0
    fresh = [(row.action["x"], row.regime["size"]) for row in trials(tmp_path) if row.cached_from is None]
    assert sorted(fresh) == [(1, 10), (1, 20), (2, 10), (2, 20)]


def test_r01_a_fresh_repeat_is_measured_again(tmp_path):
    env = FunctionEnv(tmp_path, lambda action: 1.0)

    class Again(ListedAgent):
        measures_again = True

    Again(env, [{"x": 1}] * 3).run()
    assert env.workload.measured == [1, 2, 3]
    assert [trial.repeat for trial in env.book.ledger.trials()] == [0, 1, 2]
    assert len({trial.key for trial in env.book.ledger.trials()}) == 3


def test_r01_another_workload_has_another_key(tmp_path):
    """In a shared cache the fingerprint distinguishes workloads; an equal one is a hit."""
    shared = with_draws('cache = "shared"', "[run.env_params.size]").replace(
        "parallel = 1", 'parallel = 1\nshared_cache = "c.db"'
    )
    assert campaign(tmp_path, shared, "one") == 0
    assert campaign(tmp_path, shared, "same") == 0
    assert all(row.cached_from for row in trials(tmp_path, output="same"))
    assert campaign(tmp_path, shared.replace(COMMAND, "echo y={size}{x}"), "other") == 0
    assert not all(row.cached_from for row in trials(tmp_path, output="other"))


def test_r02_a_drawn_argument_leaves_the_action_space(tmp_path):
    assert campaign(tmp_path, with_draws()) == 0
    for row in trials(tmp_path):
        assert set(row.action) == {"x"}
        assert set(row.regime) == {"size"}


def test_r02_env_params_say_how_to_draw_never_what(tmp_path):
    message = problem(tmp_path, with_draws("[run.env_params.size]\nvalues = [1, 2]"))
    assert "[run.env_params.size]" in message
    assert "unknown key 'values'" in message


@pytest.mark.parametrize(
    ("table", "size", "words"),
    [
        ("[run.env_params.sise]", "[10, 20]", ("[run.env_params.sise]", "no argument 'sise'", "Did you mean 'size'?")),
        ("[run.env_params.size]", "10", ("has one value, 10", "a list of at least two")),
        ("[run.env_params.size]", "[10]", ("has one value, 10",)),
        ("[run.env_params.size]\nweights = [1.0]", "[10, 20]", ("2 candidates but 1 weights",)),
        ("[run.env_params.size]\nweights = [1.5, -0.5]", "[10, 20]", ("negative weight",)),
        ("[run.env_params.size]\nweights = [nan, 1.0]", "[10, 20]", ("weights[0]", "finite")),
        ("[run.env_params.size]\nweights = [inf, 1.0]", "[10, 20]", ("weights[0]", "finite")),
        ("[run.env_params.size]\nweights = [0.5, 0.6]", "[10, 20]", ("add up to 1.1, not 1",)),
        ("[run.env_params.size]", "{ value = { a = 1 } }", ("is a table",)),
        ("[run.env_params.size]", "{ low = 1, high = 2 }", ("is a range",)),
    ],
)
def test_r03_impossible_draws_are_refused_at_load_time(tmp_path, table, size, words):
    message = problem(tmp_path, with_draws(table, size=size))
    for word in words:
        assert word in message


def test_r03_a_plain_run_cannot_draw(tmp_path):
    text = with_draws().replace('agent = { type = "random", trials = 24, seed = 3 }\n', "").replace("[1, 2]", "1")
    assert "[run.env_params]: needs an agent" in problem(tmp_path, text)


@pytest.mark.parametrize("kind", ["grid", "tpe", "cmaes", "nsga2", "gp"])
def test_r03_an_agent_that_does_not_declare_draws_is_refused(tmp_path, kind):
    message = problem(tmp_path, with_draws(agent=f'{{ type = "{kind}", trials = 4 }}'))
    assert f"agent '{kind}' does not sample them; agents that do: random, bandit" in message


def test_r03_every_agent_that_draws_says_how_it_uses_the_regime():
    for name in agents.names():
        if agents.get(name).samples_env_params:
            assert "regime" in (agents.get(name).__doc__ or "")


def test_r03_an_unknown_agent_gets_that_error_only(tmp_path):
    message = problem(tmp_path, with_draws(agent='{ type = "tpee", trials = 4 }'))
    assert "unknown agent 'tpee'" in message
    assert "Did you mean 'tpe'?" in message
    assert "env_params" not in message


def test_r04_a_draw_depends_on_seed_name_and_index_alone(tmp_path):
    config, size = EnvParamConfig(), Choice(values=(10, 20, 30))
    alone = Draws(3, {"size": size}, {"size": config})
    beside = Draws(3, {"drop": Choice(values=("a", "b")), "size": size}, {"drop": config, "size": config})
    assert [alone.sample(n)["size"] for n in range(50)] == [beside.sample(n)["size"] for n in range(50)]
    assert [alone.sample(n) for n in range(50)] != [
        Draws(4, {"size": size}, {"size": config}).sample(n) for n in range(50)
    ]
    campaign(tmp_path, with_draws(), "one")
    campaign(tmp_path, with_draws().replace("parallel = 1", "parallel = 2"), "two")
    regimes = [[(t.draw, t.regime) for t in trials(tmp_path, output=output)] for output in ("one", "two")]
    assert regimes[0] == regimes[1], "in any process, however many are in flight"


def test_r04_the_weights_are_respected(tmp_path):
    draws = Draws(1, {"size": Choice(values=(10, 20))}, {"size": EnvParamConfig(weights=(0.9, 0.1))})
    tens = sum(draws.sample(n)["size"] == 10 for n in range(1000))
    assert 850 < tens < 950


def test_r04_reset_uses_no_draw_and_the_index_has_its_own_column(tmp_path):
    env = FunctionEnv(tmp_path, lambda action: 1.0, draws=Weather())
    for _ in range(10):
        assert env.reset().draw == 1
    ListedAgent(env, [{"x": 1}, {"x": 2}]).run()
    assert [(t.number, t.draw) for t in env.book.ledger.trials()] == [(1, 1), (2, 2)]


def test_r05_the_regime_reaches_workload_ledger_key_and_observation(tmp_path):
    assert campaign(tmp_path, with_draws()) == 0
    rows = trials(tmp_path)
    for row in rows:
        assert row.metrics["y"] == float(f"{row.action['x']}{row.regime['size']}"), "a value, never the list"
        if row.cached_from is None:
            record = json.loads((tmp_path / f"out/r/trials/{row.number}/parameters.json").read_text())
            assert record["env_params"] == row.regime
    keys = {(row.action["x"], row.regime["size"]): row.key for row in rows}
    assert len(set(keys.values())) == 4


def test_r07_the_agent_acts_on_the_regime_that_the_trial_will_run_under(tmp_path):
    class Looking(ListedAgent):
        def select_action(self, observation: Observation) -> Action | None:
            action = super().select_action(observation)
            return None if action is None else {**action, "seen": observation.context["wind"]}

    env = FunctionEnv(tmp_path, lambda action: 1.0, draws=Weather())
    agent = Looking(env, [{"x": 1}] * 4, parallel=2)
    agent.run()
    rows = list(env.book.ledger.trials())
    assert [row.action["seen"] for row in rows] == [row.regime["wind"] for row in rows]
    assert all(feedback.previous.context == feedback.regime for feedback in agent.feedback)
    assert rows[2].cached_from == "1", "the draw came before the look-up: the same regime is answered"
    assert agent.feedback[-1].observation.context == env.reset().context, "a step's observation shows the next regime"


def test_r08_a_drawn_value_is_not_checked_again_as_an_env_param(tmp_path):
    """A drawn 10 is a scalar where the rules for env_params need a list; it must not be checked by them."""
    assert campaign(tmp_path, with_draws(agent='{ type = "bandit", trials = 12 }')) == 0
    assert all(row.outcome is Outcome.OK for row in trials(tmp_path))
    assert campaign(tmp_path, (tmp_path / "out/r/best.toml").read_text(), "again") == 0
