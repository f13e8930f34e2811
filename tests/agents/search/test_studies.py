"""Optuna studies: as a warm start, and as an export of a search."""

import optuna
import pytest
from tests.contracts.harness import FunctionEnv

import loopwright as lw
from loopwright.agents.search.samplers import Tpe, TpeConfig
from loopwright.agents.search.warm_start import warm_start_problem, warm_trials
from loopwright.core.errors import LedgerError
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Identity, Negative
from loopwright.ledger.ledger import Ledger
from loopwright.reports.search.optuna_export import write_optuna
from loopwright.spaces.parameter import Choice, Range
from loopwright.spaces.space import Space
from loopwright.workloads.base import Site

SPACE = Space({"x": Range(low=0, high=6), "mode": Choice(values=("a", "b", [1, 2]))})


@pytest.fixture(autouse=True)
def _quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def study(path, points, *, name="mine", direction="minimize"):
    """A study of somebody else's, with these values at these x."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
    created = optuna.create_study(study_name=name, storage=storage, direction=direction)
    space = {
        "x": optuna.distributions.FloatDistribution(0, 10),
        "mode": optuna.distributions.CategoricalDistribution(["a", "b"]),
    }
    for x, value in points:
        created.add_trial(optuna.trial.create_trial(params={"x": x, "mode": "a"}, distributions=space, value=value))
    storage.engine.dispose()


def env_of(directory, reward):
    env = FunctionEnv(directory, lambda arguments: 0.0, space=SPACE, rewards=(reward,))
    env.workload.site = Site(directory, directory)
    return env


def test_a_study_is_learned_from_under_the_reward_of_the_run(tmp_path):
    """Given a study that minimizes, its values are the metric; points outside the space are left out."""
    study(tmp_path / "optuna.db", [(1.0, 5.0), (2.0, 4.0), (9.0, 0.0)])
    env = env_of(tmp_path, Negative(metrics=("y",)))
    expected = [({"x": 1.0, "mode": "a"}, {}, (-5.0,)), ({"x": 2.0, "mode": "a"}, {}, (-4.0,))]
    assert list(warm_trials(env, "sqlite:///optuna.db#mine")) == expected
    other = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/optuna.db")
    optuna.load_study(study_name="mine", storage=other).add_trial(optuna.trial.create_trial(value=1.0))
    other.engine.dispose()
    # After a resume the same trials count; the name may be left out.
    assert list(warm_trials(env, "sqlite:///optuna.db")) == expected
    env.book.ledger.close()


def test_a_sampler_learns_the_mean_of_a_point_that_was_measured_again(tmp_path):
    study(tmp_path / "optuna.db", [(1.0, 5.0), (2.0, 4.0), (1.0, 7.0)])
    env = env_of(tmp_path, Negative(metrics=("y",)))

    agent = Tpe(env, TpeConfig(trials=5, warm_start="sqlite:///optuna.db"))

    assert [(trial.params["x"], trial.value) for trial in agent._study.trials] == [(1.0, -6.0), (2.0, -4.0)]
    env.book.ledger.close()


def test_a_study_that_prefers_the_opposite_is_refused(tmp_path):
    study(tmp_path / "optuna.db", [(1.0, 5.0), (2.0, 4.0)])
    env = env_of(tmp_path, Identity(metrics=("y",)))
    with pytest.raises(LedgerError, match="minimizes its value"):
        list(warm_trials(env, "sqlite:///optuna.db#mine"))
    env.book.ledger.close()


def test_a_study_that_is_not_there_is_found_when_the_scenario_is_loaded(tmp_path):
    study(tmp_path / "optuna.db", [])
    (tmp_path / "text.db").write_text("hello, this is not a database")
    problems = {
        "sqlite:///nowhere.db#mine": "does not exist",
        "sqlite:///optuna.db#mina": "Did you mean 'mine'?",
        "sqlite:///text.db#mine": "is not a storage of Optuna",
        "nowhere": "has no ledger.db",
    }
    for source, message in problems.items():
        assert message in warm_start_problem(source, tmp_path)
    assert warm_start_problem("sqlite:///optuna.db#mine", tmp_path) is None
    assert not (tmp_path / "nowhere.db").exists()


def test_an_exported_search_is_a_study_that_warms_up_another(tmp_path):
    """Given successes and failures, the study has the metric in its own direction, and reads back as it was."""

    def measure(x, mode):
        if x > 4:
            raise ValueError("too large")
        return {"loss": x}

    space = {"x": lw.uniform(0, 6), "mode": ["a", "b", [1, 2]]}
    output = lw.tune(
        measure, space, minimize="loss", trials=12, agent="random", output=tmp_path / "out", in_process=True
    )
    (path,) = output.output.glob("*/ledger.db")
    with Ledger.read(path) as ledger:
        trials = list(ledger.trials())
        write_optuna(ledger, tmp_path / "optuna.db")
        write_optuna(ledger, tmp_path / "optuna.db")  # over the earlier one
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/optuna.db")
    loaded = optuna.load_study(study_name="measure", storage=storage)
    stored = loaded.get_trials()
    storage.engine.dispose()
    assert loaded.direction.name == "MINIMIZE"
    assert [trial.user_attrs["trial"] for trial in stored] == [trial.number for trial in trials]
    for ours, theirs in zip(trials, stored, strict=True):
        assert theirs.state.name == ("COMPLETE" if ours.outcome is Outcome.OK else "FAIL")
        assert theirs.params["x"] == ours.action["x"]
        assert theirs.value == (ours.metrics["loss"] if ours.outcome is Outcome.OK else None)

    env = env_of(tmp_path, Negative(metrics=("loss",)))
    expected = [(t.action, {}, (-t.metrics["loss"],)) for t in trials if t.outcome is Outcome.OK]
    assert list(warm_trials(env, "sqlite:///optuna.db#measure")) == expected
    env.book.ledger.close()
