"""The contract G06, and S03, S04, R05 and R07 for Gymnasium: trial numbers and regimes."""

import inspect
import sys

import numpy as np
import pytest
from stable_baselines3 import PPO

import loopwright
from loopwright.agents.rl.vec_envs import SlotVecEnv
from loopwright.envs.gym import adapter as adapter_module
from loopwright.envs.gym.adapter import Driver, GymnasiumAdapter, LiveAdapter
from loopwright.ledger.trial_book import TrialBook
from tests.contracts.gymnasium_harness import DRAWN, DRAWN_SPEED, SPEEDS, live_scenario, study_env, write_scenario
from tests.envs.helpers import LineServer, live_env, search_env


@pytest.fixture
def study(tmp_path):
    return study_env(tmp_path)


def test_g06_no_adapter_changes_the_counter():
    for module in (adapter_module, sys.modules[SlotVecEnv.__module__]):
        source = inspect.getsource(module)
        assert "increment_step" not in source
        assert ".step =" not in source.replace("self.step = env.step_now", "")


def test_g06_s03_the_counter_rises_once_per_step_however_often_it_is_reset(study, monkeypatch):
    advanced = []
    plain = TrialBook.increment_step
    monkeypatch.setattr(TrialBook, "increment_step", lambda book: advanced.append(1) or plain(book))
    env = GymnasiumAdapter(study, view="flat")
    env.action_space.seed(0)
    for n in range(1, 6):
        first, _ = env.reset()
        for _ in range(3):
            again, info = env.reset()
            assert info["trial"] == n - 1
            np.testing.assert_array_equal(first["context"], again["context"])
        *_, info = env.step(env.action_space.sample())
        assert info["trial"] == len(advanced) == n
    assert [(trial.number, trial.draw) for trial in study.book.ledger.trials()] == [(n, n) for n in range(1, 6)]
    env.close()


def test_s03_numbers_rise_in_the_loop_of_sb3(study):
    env = GymnasiumAdapter(study, view="flat")
    PPO("MultiInputPolicy", env, n_steps=8, batch_size=8, n_epochs=1, device="cpu").learn(16)
    assert [trial.number for trial in study.book.ledger.trials()] == list(range(1, 17))
    assert [trial.draw for trial in study.book.ledger.trials()] == list(range(1, 17))
    env.close()


def test_s03_each_slot_gets_its_own_number(study):
    driver = Driver(study, "flat")
    slots = SlotVecEnv(driver, 4)
    slots.reset()
    for _ in range(3):
        slots.reset()
        _, _, done, infos = slots.step(np.stack([slots.action_space.sample() for _ in range(4)]))
        assert done.all()
    assert [info["trial"] for info in infos] == [9, 10, 11, 12]
    assert sorted(trial.draw for trial in study.book.ledger.trials()) == list(range(1, 13))
    driver.close()


def test_s04_cached_infeasible_and_live_trials_carry_the_advanced_number(tmp_path):
    env = GymnasiumAdapter(search_env(tmp_path, {"x": [1, 2]}, lambda x: x, constraints=("x < 2",)))
    assert [env.step_raw({"x": x})[4]["trial"] for x in (1, 1, 2)] == [1, 2, 3]
    assert [(t.number, t.outcome, t.cached_from) for t in env.inner.book.ledger.trials()] == [
        (1, "ok", None),
        (2, "ok", "1"),
        (3, "infeasible", None),
    ]
    env.close()
    walk = LiveAdapter(live_env(tmp_path / "live"))
    walk.reset()
    assert [walk.step(1)[4]["trial"] for _ in range(3)] == [1, 2, 3]
    walk.close()
    assert [trial.number for trial in walk.inner.book.ledger.trials()] == [1, 2, 3]


def test_r05_the_regime_reaches_info_ledger_and_workload(study):
    env = GymnasiumAdapter(study, view="dict")
    env.reset()
    *_, info = env.step_raw({"tile": 8, "rate": 1.0, "depth": 2, "one": 5})
    (trial,) = study.book.ledger.trials()
    assert info["env_params"] == trial.regime
    assert {name: study.workload.calls[0][name] for name in DRAWN} == trial.regime
    assert not any(isinstance(value, list | tuple) for value in study.workload.calls[0].values())
    env.close()


def test_r07_an_observation_shows_the_regime_that_the_next_trial_runs_under(study):
    env = GymnasiumAdapter(study, view="dict")
    observation, _ = env.reset()
    env.action_space.seed(0)
    for n in range(20):
        context = observation["context"]
        if n % 3 == 0:
            env.reset()  # in between, as some libraries do
        observation, *_, info = env.step(env.action_space.sample())
        assert context["drop"] == pytest.approx(info["env_params"]["drop"])
        assert ["x", "y"][context["kind"]] == info["env_params"]["kind"]
    env.close()


@pytest.mark.parametrize("record", ["steps", "episodes"])
def test_r05_a_live_regime_reaches_server_ledger_info_and_context(tmp_path, record):
    env = LiveAdapter(live_env(tmp_path, drawn=SPEEDS, encodings={"speed": "scalar"}, record=record), view="dict")
    regimes = []
    for _ in range(6):
        observation, info = env.reset()
        over = False
        while not over:
            assert observation["context"]["speed"] == pytest.approx(info["env_params"]["speed"])
            assert SPEEDS["wind"][observation["context"]["wind"]] == info["env_params"]["wind"]
            assert env.inner.server.resets[-1]["env_params"] == info["env_params"]
            observation, _, over, _, info = env.step(1)
        regimes.append(info["env_params"])
    env.close()
    assert [one["regime"] for one in env.inner.book.ledger.episodes()] == regimes
    assert len({str(regime) for regime in regimes}) > 1
    rows = [row.regime for row in env.inner.book.ledger.trials()]
    assert rows == [regime for regime in regimes for _ in range(5 if record == "steps" else 1)]


def test_r05_a_failed_step_still_returns_its_regime(tmp_path):
    env = LiveAdapter(live_env(tmp_path, LineServer({2: 5}), drawn=SPEEDS))
    first, _ = env.reset()
    env.step(1)
    observation, _, _, truncated, info = env.step(1)
    assert (truncated, info["outcome"]) == (True, "metric_missing")
    assert observation in env.observation_space
    np.testing.assert_array_equal(observation["context"], first["context"])
    env.close()


def test_r05_writing_into_an_observation_changes_no_other(tmp_path):
    env = LiveAdapter(live_env(tmp_path, drawn=SPEEDS))
    first, _ = env.reset()
    original = first["context"].copy()
    first["context"][:] = 7
    np.testing.assert_array_equal(env.step(1)[0]["context"], original)
    env.close()


def test_r07_the_last_observation_of_a_live_episode_has_its_own_regime_and_reset_the_next_one(tmp_path):
    env = LiveAdapter(live_env(tmp_path, drawn={"speed": list(range(50))}, encodings={"speed": "scalar"}))
    speeds = []
    for _ in range(8):
        first, reset_info = env.reset()
        again, _ = env.reset()  # as some libraries do
        observations = [first, again, *(env.step(1)[0] for _ in range(5))]
        assert {float(one["context"][0]) for one in observations} == {float(reset_info["env_params"]["speed"])}
        speeds.append(reset_info["env_params"]["speed"])
    env.close()
    assert [one["regime"]["speed"] for one in env.inner.book.ledger.episodes()] == speeds
    assert len(set(speeds)) > 4


@pytest.mark.parametrize("view", ["dict", "flat"])
def test_r07_make_shows_the_regime_of_a_live_run(tmp_path, view):
    path = write_scenario(tmp_path, live_scenario(more=DRAWN_SPEED + '\nencoding = "scalar"'))
    env = loopwright.make(path, view=view)
    for _ in range(3):
        observation, info = env.reset()
        speed = observation["context"]["speed"] if view == "dict" else observation["context"]
        assert speed == pytest.approx(info["env_params"]["speed"])
        assert env.step(1)[4]["env_params"] == info["env_params"]
    env.close()


def test_r07_a_live_reset_returns_the_regime_of_the_following_steps(tmp_path):
    env = LiveAdapter(live_env(tmp_path, drawn={"speed": [1, 2, 3]}))
    for _ in range(6):
        _, reset_info = env.reset()
        for _ in range(2):
            assert env.step(1)[4]["env_params"] == reset_info["env_params"]
    env.close()
