"""The Gymnasium adapter: one slot and several, feedback, and limits."""

import asyncio

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from tests.envs.helpers import CountingWorkload, live_env, search_env

from loopwright.core.errors import InvalidAction
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Penalties, Result
from loopwright.envs.gym.adapter import Driver, GymnasiumAdapter, LiveAdapter
from loopwright.envs.gym.observation import ObsLeafDescriptor
from loopwright.envs.gym.vector import VectorAdapter
from loopwright.envs.search import SearchEnv
from loopwright.ledger.trial_book import RunStopped

ARGUMENTS = {"x": [1, 2, 3], "wind": ["calm", "storm"], "name": "n"}


def product(x, wind="calm", name="n"):
    return x * (10 if wind == "storm" else 1)


@pytest.fixture
def adapter(tmp_path):
    env = GymnasiumAdapter(search_env(tmp_path, ARGUMENTS, product, env_params={"wind": {}}), view="dict")
    yield env
    env.close()
    env.inner.book.ledger.close()


def failing(x):
    return {1: -40.0, 2: Result(Outcome.CRASHED, reason="bad"), 3: -1.0}[x]


def rewards(env, *actions):
    return [env.step_raw({"x": x})[1] for x in actions]


def test_a_failure_gets_less_than_the_worst_reward_so_far(tmp_path):
    env = GymnasiumAdapter(search_env(tmp_path, {"x": [1, 2, 3]}, failing))
    first, _, after = rewards(env, 2, 1, 2)
    assert first < 0
    assert after < -40
    env.close()
    assert [trial.reward is None for trial in env.inner.book.ledger.trials()] == [True, False, True]


def test_the_worst_reward_is_remembered_over_a_resume(tmp_path):
    env = GymnasiumAdapter(search_env(tmp_path, {"x": [1, 2, 3]}, failing))
    rewards(env, 1)
    env.close()
    env.inner.book.ledger.close()
    again = GymnasiumAdapter(search_env(tmp_path, {"x": [1, 2, 3]}, failing))
    assert rewards(again, 2)[0] < -40
    again.close()


@pytest.mark.parametrize("worst", [-1e8, -1e30])
def test_the_reward_of_a_failure_is_lower_in_float32_too(tmp_path, worst):
    answers = {1: worst, 2: Result(Outcome.TIMEOUT)}
    env = GymnasiumAdapter(search_env(tmp_path, {"x": [1, 2]}, lambda x: answers[x]))
    rewards_received = rewards(env, 1, 2)
    assert np.float32(rewards_received[1]) < np.float32(rewards_received[0])
    env.close()


def test_the_learner_receives_the_configured_penalty(tmp_path):
    answers = {1: 5.0, 2: Result(Outcome.CRASHED), 3: 1.0}
    env = GymnasiumAdapter(
        search_env(
            tmp_path,
            {"x": [1, 2, 3]},
            lambda x: answers[x],
            constraints=("x != 3",),
            penalties=Penalties(metric_failure=-7.0, constraint_failure=-3.0),
        )
    )
    assert rewards(env, 1, 2, 3) == [5.0, -7.0, -3.0]
    env.close()


def test_an_infeasible_trial_returns_an_observation_of_the_declared_shape(tmp_path):
    env = GymnasiumAdapter(search_env(tmp_path, {"x": [1, 2]}, lambda x: x, constraints=("x < 2",), metrics=("y", "z")))
    observation, _, terminated, _, info = env.step_raw({"x": 2})
    assert env.observation_space.contains(observation)
    assert (terminated, info["outcome"]) == (True, "infeasible")
    env.close()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"x": 1}, "missing fixed parameter 'name'"),
        ({"name": "n"}, "missing parameter 'x'"),
        ({"x": 1, "name": "other"}, "name: 'other' is not the fixed value 'n'"),
        ({"x": 1, "name": "n", "wind": "calm"}, "unknown parameter 'wind'"),
        ({"x": 9, "name": "n"}, "x: 9 is not one of 1, 2, 3"),
    ],
)
def test_step_raw_takes_exactly_the_tunable_and_the_fixed(adapter, values, words):
    with pytest.raises(ValueError, match=words):
        adapter.step_raw(values)
    assert adapter.inner.book.step == 0


def test_native_values_and_encoded_numbers_are_the_same_action(adapter):
    adapter.reset()
    adapter.step_raw({"x": 2, "name": "n"})
    adapter.step(adapter.encode_action({"x": 2}))
    first, second = adapter.inner.book.ledger.trials()
    assert first.action == second.action == {"x": 2}
    assert adapter.decode_action({"x": 1}) == {"x": 2}


def test_an_invalid_action_uses_up_neither_a_number_nor_a_draw(adapter):
    before, _ = adapter.reset()
    with pytest.raises(ValueError, match="index 9"):
        adapter.step({"x": 9})
    after, info = adapter.reset()
    assert info["trial"] == 0
    assert before["context"] == after["context"]


def test_an_environment_may_describe_its_own_observations(tmp_path):
    class Windy(SearchEnv):
        def structured_observation_descriptors(self):
            return {"speed": ObsLeafDescriptor.box(2), "side": ObsLeafDescriptor.discrete(2)}

        def encode_observation(self, metrics, regime):
            return {"speed": [1.0, 2.0], "side": int(regime.get("wind") == "storm")}

    env = GymnasiumAdapter(search_env(tmp_path, ARGUMENTS, product, env_params={"wind": {}}, kind=Windy), view="dict")
    observation, info = env.reset()
    assert env.observation_space["context"]["side"] == spaces.Discrete(2)
    assert observation["context"]["side"] == (info["env_params"]["wind"] == "storm")
    env.close()


def test_a_closed_environment_cannot_be_used(adapter):
    adapter.reset()
    adapter.close()
    with pytest.raises(InvalidAction, match="the environment is closed: make another one"):
        adapter.step(adapter.action_space.sample())


def test_closing_twice_is_allowed(adapter):
    adapter.close()
    adapter.close()


# -- several slots ------------------------------------------------------------------------------------------------


@pytest.fixture
def vector(tmp_path):
    env = VectorAdapter(search_env(tmp_path, ARGUMENTS, product, env_params={"wind": {}}), 3, view="flat")
    yield env
    env.close()
    env.inner.book.ledger.close()


def test_several_slots_are_in_flight_together(vector):
    vector.reset(seed=1)
    vector.step(np.array([[0], [1], [2]]))
    assert vector.inner.workload.max_in_flight == 3
    assert [trial.number for trial in vector.inner.book.ledger.trials()] == [1, 2, 3]


def test_a_vector_is_a_gymnasium_vector_env(vector):
    assert isinstance(vector, gymnasium.vector.VectorEnv)
    assert vector.metadata["autoreset_mode"] is gymnasium.vector.AutoresetMode.SAME_STEP
    observation, infos = vector.reset(seed=5)
    assert vector.observation_space.contains(observation)
    assert vector.np_random_seed == 5
    assert set(infos) >= {"env_params", "trial"}
    for _ in range(4):
        observation, rewards_received, terminated, truncated, infos = vector.step(vector.action_space.sample())
        assert vector.observation_space.contains(observation)
        assert rewards_received.shape == terminated.shape == truncated.shape == (3,)
        assert terminated.all()
        assert not truncated.any()
        assert all(vector.single_observation_space.contains(one) for one in infos["final_obs"])
    assert list(infos["trial"]) == [10, 11, 12]
    assert list(infos["final_info"]["trial"]) == [10, 11, 12]


def test_each_slot_runs_under_the_regime_that_it_observed(vector):
    observation, _ = vector.reset()
    for _ in range(10):
        indices = [row.argmax() for row in observation["context"]]
        observation, rewards_received, _, _, infos = vector.step(np.array([[0], [1], [2]]))
        ran = [infos["env_params"]["wind"][slot] for slot in range(3)]
        assert ran == [("calm", "storm")[index] for index in indices]
        assert list(rewards_received) == [product(x, wind) for x, wind in zip((1, 2, 3), ran, strict=True)]


def test_repeated_resets_of_a_vector_use_up_no_draw(vector):
    first, _ = vector.reset()
    for _ in range(5):
        again, _ = vector.reset()
        np.testing.assert_array_equal(first["context"], again["context"])
    vector.step(np.array([[0], [0], [0]]))
    assert [trial.draw for trial in vector.inner.book.ledger.trials()] == [1, 2, 3]
    vector.step(np.array([[0], [0], [0]]))
    assert sorted(trial.draw for trial in vector.inner.book.ledger.trials()) == [1, 2, 3, 4, 5, 6]


def test_a_vector_needs_at_least_one_slot(tmp_path):
    with pytest.raises(ValueError, match="at least one slot, not 0"):
        VectorAdapter(search_env(tmp_path, ARGUMENTS), 0)


def test_gymnasium_wrappers_accept_a_vector(vector):
    recorded = gymnasium.wrappers.vector.RecordEpisodeStatistics(vector)
    recorded.reset()
    *_, infos = recorded.step(np.array([[0], [1], [2]]))
    assert list(infos["episode"]["l"]) == [1, 1, 1]


# -- stopping and going on ----------------------------------------------------------------------------------------


class Slow(CountingWorkload):
    async def run(self, job):
        self.calls.append(dict(job.arguments))
        await asyncio.sleep(3600 if job.arguments["x"] == 3 else 0)
        return await super().run(job)


def test_a_stop_aborts_running_trials_which_resume_under_their_numbers(tmp_path):
    env = search_env(tmp_path, ARGUMENTS, product, env_params={"wind": {}})
    env.workload = Slow(product)
    driver = Driver(env, "flat")
    driver._loop.call_later(0.1, env.book.stop)
    with pytest.raises(RunStopped):
        driver.step([{"x": 1}, {"x": 3}])
    with pytest.raises(RunStopped):
        driver.step([{"x": 1}])
    driver.close()
    one, two = env.book.ledger.trials()
    assert (one.outcome, two.outcome) == (Outcome.OK, Outcome.ABORTED)
    env.book.ledger.close()

    again = search_env(tmp_path, ARGUMENTS, product, env_params={"wind": {}})
    driver = Driver(again, "flat")
    (_, redone) = again.book.ledger.trials()
    assert (redone.number, redone.draw, redone.regime, redone.outcome) == (2, two.draw, two.regime, Outcome.OK)
    assert driver.step([{"x": 2}])[0].trial == 3
    driver.close()


def test_an_exception_in_one_slot_cancels_the_others(tmp_path):
    env = search_env(tmp_path, ARGUMENTS, lambda x, **_: 1 / 0)
    env.workload = Slow(lambda x, **_: 1 / 0)
    driver = Driver(env, "flat")
    with pytest.raises(ZeroDivisionError):
        driver.step([{"x": 1, "wind": "calm"}, {"x": 3, "wind": "calm"}])
    assert not asyncio.all_tasks(driver._loop)
    driver.close()


# -- live ---------------------------------------------------------------------------------------------------------


def test_a_live_adapter_has_the_spaces_of_its_server(tmp_path):
    env = LiveAdapter(live_env(tmp_path))
    assert env.unwrapped is env
    assert env.action_space == spaces.Discrete(3)
    env.reset(seed=3)
    assert env.np_random_seed == 3
    env.close()
    env.close()
    assert env.inner.server.closed == 1
