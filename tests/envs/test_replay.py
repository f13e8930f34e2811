"""Replays of recorded searches, and races on them: measured points from the ledger, labelled estimates for the rest."""

import asyncio
import sqlite3
from random import Random

import pytest

import loopwright as lw
from loopwright.agents import agents
from loopwright.agents.search.race import RaceError, race
from loopwright.core.errors import LedgerError
from loopwright.core.outcome import Outcome
from loopwright.envs.neighbour_model import NeighbourModel
from loopwright.envs.replay import ESTIMATED, Recording, ReplayEnv
from loopwright.ledger.ledger import Ledger
from loopwright.reports.race import write_race
from loopwright.selection.regret import RegretCurves, RegretMeter
from loopwright.spaces.parameter import Choice, Range


def record(directory, measure=None, space=None, trials=40, **options):
    """The output directory of a small search."""
    space = space or {"x": lw.uniform(0, 6), "mode": ["a", "b"]}
    measure = measure or (lambda x, mode: 10 - (x - 3) ** 2 + (mode == "b"))
    options = {"maximize": True, "agent": "random", "seed": 1, **options}
    return lw.tune(measure, space, trials=trials, output=directory / "out", in_process=True, **options).output


def step(env, action):
    return asyncio.run(env.step(action))


def test_a_measured_point_is_answered_from_the_ledger_and_others_by_a_labelled_model(tmp_path):
    output = record(tmp_path)
    (path,) = output.glob("*/ledger.db")
    with Ledger.read(path) as ledger:
        first = next(iter(ledger.trials()))
    with lw.replay(output) as env:
        assert step(env, first.action).reward.value == first.reward.value
        feedback = step(env, {"x": 3.01, "mode": "b"})
        measured, estimated = env.book.ledger.trials()
        assert measured.reason == f"measured in trial 1 of {path.parent}"
        assert estimated.reason == ESTIMATED
        assert env.estimated == 1
        assert 10 < feedback.reward.value <= RegretMeter(env.recording).best <= 11
        directory = env.book.directory
    assert not directory.exists()


@pytest.mark.parametrize("name", ["random", "tpe", "bandit"])
def test_the_ordinary_agents_drive_a_replay(tmp_path, name):
    """Given a recording, an agent uses its budget, and the same seed gives the same trials."""
    recording, agent = Recording.read(record(tmp_path)), agents.get(name)

    def search():
        with ReplayEnv(recording, trials=15) as env:
            assert agent(env, agent.Config(type=name, trials=15, seed=3)).run() == 0
            return [(trial.action, trial.reward.value) for trial in env.book.ledger.trials()]

    assert len(search()) == 15
    assert search() == search()


def test_repeats_give_the_recorded_measurements_in_turn(tmp_path):
    """Given a point that was measured several times, a replay that measures again gives each of them."""
    noise = Random(1)
    output = record(tmp_path, lambda x: x + noise.random(), {"x": [1, 2]}, trials=30)
    recording = Recording.read(output)
    values = [recording.answer({"x": 2}, turn).metrics["value"] for turn in range(4)]
    assert len(set(values)) > 1
    assert recording.value({"x": 2}, {}) == pytest.approx(2.5, abs=0.5)


def test_a_region_that_failed_fails_in_the_replay(tmp_path):
    def measure(x):
        if x > 3:
            raise ValueError("too large")
        return x

    with lw.replay(record(tmp_path, measure, {"x": lw.uniform(0, 6)}, trials=60)) as env:
        failed, ok = step(env, {"x": 5.5}), step(env, {"x": 0.5})
        assert (failed.outcome, ok.outcome) == (Outcome.CRASHED, Outcome.OK)
        assert "of its measured neighbours failed" in next(iter(env.book.ledger.trials())).reason


def test_a_conditional_parameter_may_be_absent(tmp_path):
    space = {"x": [1, 2, 3], "y": {"low": 0, "high": 1, "when": "x > 1", "otherwise": -1}}
    with lw.replay(record(tmp_path, lambda x, y=0: x + y, space)) as env:
        assert step(env, {"x": 1}).reward.value == 0
        assert step(env, {"x": 3, "y": 0.5}).reward.value > 2


def test_a_ledger_that_is_being_written_can_be_replayed(tmp_path):
    (path,) = record(tmp_path).glob("*/ledger.db")
    with Ledger.open(path) as writer:
        connection = sqlite3.connect(path)
        connection.execute("BEGIN IMMEDIATE")
        assert Recording.read(tmp_path / "out").proposals == 32
        connection.close()
        assert writer.last()[0] >= 32


def test_what_cannot_be_replayed_is_named(tmp_path):
    with pytest.raises(LedgerError, match="contains no ledger"):
        lw.replay(tmp_path)

    def fail(x):
        raise ValueError("no")

    with pytest.raises(LedgerError, match="no trial with a reward"):
        lw.replay(record(tmp_path, fail, {"x": [1, 2]}, trials=2))


def test_the_model_counts_what_matters():
    """Given one parameter that matters and three that do not, the fit explains more than equal weights would."""
    random = Random(1)
    space = {"x": Range(low=0, high=1)} | {f"n{i}": Choice(values=("a", "b", "c")) for i in range(3)}
    points = [{name: parameter.sample(random) for name, parameter in space.items()} for _ in range(100)]
    model = NeighbourModel(space, points, [(point["x"],) for point in points])
    assert model.explained > 0.95
    assert model.predict({"x": 0.4, "n0": "a", "n1": "b", "n2": "c"}).values[0] == pytest.approx(0.4, abs=0.1)


# -- races -----------------------------------------------------------------------------------------------------------


def test_race_gives_falling_regret_and_a_page(tmp_path):
    recording = Recording.read(record(tmp_path, trials=80))
    results = race(recording, ["tpe", "random"], seeds=3, trials=25)
    assert [result.agent for result in results] == ["tpe", "random"]
    for result in results:
        assert [len(curve) for curve in result.curves] == [25] * 3
        assert 0 <= result.band()[-1][1] < RegretMeter(recording).of_chance
        assert all(low <= middle <= high for low, middle, high in result.band())
    page = write_race(results, recording, tmp_path / "race.html").read_text()
    assert "Regret by trial" in page
    assert '"title":"regret"' in page


def test_regret_follows_the_best_mean_so_far(tmp_path):
    """Given the best recorded point, the regret is 0; before any success it is that of chance."""
    recording = Recording.read(record(tmp_path, lambda x: x, {"x": [1, 2, 3, 4]}))
    meter = RegretMeter(recording)
    assert (meter.best, meter.of_chance) == (4, 1.5)
    with ReplayEnv(recording, trials=9) as env:
        for x in (7, 1, 3, 2, 4):
            step(env, {"x": x})
        assert meter.curve(env.book.ledger.trials()) == [1.5, 3, 1, 1, 0]
    assert RegretCurves("a", ((3.0, 1.0), (3.0, 2.0)), 0.0, 1.0).trials_to(1.5) == 2


def record_command(directory, **run):
    """A recorded search over two regimes."""
    table = {
        "name": "r",
        "agent": {"type": "random", "trials": 24},
        "env_params": {"load": {}},
        "reward": {"type": "negative", "metrics": ["y"]},
        "workload": {
            "type": "command",
            "command": "echo y={x}{load}",
            "metrics": {"y": {"regex": "y=([0-9]+)"}},
            "args": {"x": [1, 2, 3], "load": [1, 2]},
        },
    }
    lw.run({"name": "s", "run": [table | run]}, directory / "out", progress=False)
    return Recording.read(directory / "out")


def test_race_over_regimes_takes_agents_that_sample_them(tmp_path):
    recording = record_command(tmp_path)
    (result,) = race(recording, ["bandit"], seeds=2, trials=20)
    assert result.band()[-1][1] == 0
    with pytest.raises(RaceError, match=r"'tpe' does not sample env_params.*: .*bandit"):
        race(recording, ["tpe"], seeds=1, trials=5)


def test_race_needs_one_objective(tmp_path):
    rewards = [{"type": "negative", "metrics": ["y"]}, {"type": "identity", "metrics": ["y"]}]
    recording = record_command(tmp_path, reward=rewards, agent={"type": "random", "trials": 2})
    with pytest.raises(RaceError, match="a race needs one"):
        race(recording, ["random"], seeds=1, trials=5)


@pytest.mark.parametrize(
    ("name", "message"), [("tpee", "mean 'tpe'"), ("grid", "budget of `trials`"), ("ppo", "space")]
)
def test_race_refuses_agents_that_cannot_search_the_space(tmp_path, name, message):
    with pytest.raises(RaceError, match=message):
        race(Recording.read(record(tmp_path)), [name], seeds=1, trials=5)
