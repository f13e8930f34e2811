"""The contracts G01–G05: the adapters pass the checkers, and their spaces and encodings."""

import gymnasium
import numpy as np
import pytest
import stable_baselines3.common.env_checker as sb3_checker
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loopwright.agents.rl.library_spaces import wrap_for_library
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Identity, Objectives
from loopwright.envs.gym.adapter import GymnasiumAdapter, LiveAdapter
from loopwright.envs.gym.vector import VectorAdapter
from loopwright.envs.search import SearchEnv
from loopwright.spaces.parameter import parameter
from loopwright.spaces.space import Draws, EnvParamConfig
from tests.contracts.gymnasium_harness import (
    ARGUMENTS,
    DRAWN,
    SPEEDS,
    batch_scenario,
    check,
    load_error,
    score,
    study_env,
)
from tests.envs.gym.test_codec import made_spaces
from tests.envs.helpers import CountingWorkload, LineServer, SampleServer, live_env, search_env, trial_book


@pytest.fixture
def study(tmp_path):
    return study_env(tmp_path)


@pytest.mark.parametrize("view", ["dict", "flat"])
def test_g01_the_adapter_passes_gymnasiums_checker(study, view):
    env = GymnasiumAdapter(study, view=view)
    assert isinstance(env, gymnasium.Env)
    check(env, skip_close_check=True)
    assert [trial.outcome for trial in study.book.ledger.trials()] == [Outcome.OK] * study.book.step
    env.close()


def test_g01_the_flat_view_passes_sb3s_checker(study):
    env = GymnasiumAdapter(study, view="flat")
    check(env, sb3_checker.check_env)
    env.close()


@pytest.mark.parametrize("view", ["flat", "discrete"])
def test_g01_spaces_of_lists_pass_both_checkers_in_every_view(tmp_path, view):
    env = GymnasiumAdapter(search_env(tmp_path, {"x": [1, 2], "z": ["a", "b", "c"]}, lambda x, z: x), view=view)
    check(env, skip_close_check=True)
    check(env, sb3_checker.check_env)
    env.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(space=made_spaces(), data=st.data(), view=st.sampled_from(["dict", "flat"]))
def test_g01_any_space_passes_the_checkers(tmp_path_factory, space, data, view):
    candidates = [name for name in space.tunable if name.startswith("list")][1:]
    env_params = data.draw(st.sets(st.sampled_from(candidates))) if candidates else set()
    space = type(space)({**space.parameters, "d": parameter([1, 2.5, 30])}, (), frozenset({*env_params, "d"}))
    configs = {name: EnvParamConfig() for name in env_params}
    configs["d"] = EnvParamConfig(encoding=data.draw(st.sampled_from(["categorical", "scalar", "log"])))
    env = SearchEnv(
        trial_book(tmp_path_factory.mktemp("any")),
        space=space,
        workload=CountingWorkload(lambda **_: 1.0),
        draws=Draws(0, space.parameters, configs),
        objectives=Objectives((Identity(metrics=("y",)),)),
        metric_names=("y", "z"),
    )
    adapter = GymnasiumAdapter(env, view=view)
    check(adapter, skip_close_check=True)
    if view == "flat":
        check(adapter, sb3_checker.check_env)
    adapter.close()
    env.book.ledger.close()


def test_g01_a_live_environment_passes_both_checkers(tmp_path):
    env = LiveAdapter(live_env(tmp_path, gymnasium.make("CartPole-v1").unwrapped))
    check(env, skip_close_check=True)
    check(env, sb3_checker.check_env)
    env.close()


plain_spaces = st.one_of(
    st.builds(spaces.Discrete, st.integers(1, 5)),
    st.builds(spaces.MultiBinary, st.integers(1, 4)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 4), min_size=1, max_size=3)),
    st.builds(
        lambda size, dtype: spaces.Box(0, 100, (size,), dtype),
        st.integers(1, 4),
        st.sampled_from([np.float32, np.float64, np.uint8, np.int64]),
    ),
)


named_spaces = st.builds(spaces.Dict, st.dictionaries(st.sampled_from("abc"), plain_spaces, min_size=1))


nested_spaces = st.one_of(
    st.builds(spaces.Tuple, st.lists(plain_spaces, min_size=1, max_size=3)),
    st.builds(spaces.Dict, st.dictionaries(st.sampled_from("abc"), named_spaces, min_size=1)),
)


@pytest.mark.parametrize("view", ["dict", "flat"])
def test_g01_a_live_environment_with_a_regime_passes_both_checkers(tmp_path, view):
    env = LiveAdapter(live_env(tmp_path, SampleServer(spaces.Box(-1, 1, (4,))), drawn=SPEEDS), view=view)
    check(env, skip_close_check=True)
    if view == "flat":
        check(env, sb3_checker.check_env)
    env.close()


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(), view=st.sampled_from(["dict", "flat"]), encoding=st.sampled_from(["categorical", "scalar", "log"])
)
def test_g01_observations_of_any_space_pass_together_with_the_regime(tmp_path_factory, data, view, encoding):
    nested = data.draw(st.booleans())
    space = data.draw(nested_spaces if nested else st.one_of(plain_spaces, named_spaces))
    inner = live_env(tmp_path_factory.mktemp("any"), SampleServer(space), drawn=SPEEDS, encodings={"speed": encoding})
    env = LiveAdapter(inner, view=view)
    check(env, skip_close_check=True)
    if view == "flat":
        # SB3 takes nothing nested: what its learner gets is one row then.
        check(wrap_for_library(env, "sb3") if nested else env, sb3_checker.check_env)
        check(wrap_for_library(env, "rllib"), sb3_checker.check_env)
    env.close()
    inner.book.ledger.close()


def test_g01_unwrapped_is_the_adapter(study):
    env = GymnasiumAdapter(study)
    assert env.unwrapped is env
    assert gymnasium.wrappers.TimeLimit(env, 5).unwrapped is env
    env.close()


def test_g01_a_vector_returns_elements_of_its_spaces(study):
    env = VectorAdapter(study, 2, view="dict")
    observation, _ = env.reset(seed=1)
    assert observation in env.observation_space
    observation, rewards, terminated, _, _ = env.step(env.action_space.sample())
    assert observation in env.observation_space
    assert rewards.dtype == np.float64
    assert terminated.dtype == bool
    env.close()


def test_g02_lists_are_discrete_ranges_are_boxes_and_one_candidate_is_fixed(study):
    env = GymnasiumAdapter(study, view="dict")
    assert env.action_space == spaces.Dict(
        {
            "tile": spaces.Discrete(3),
            "rate": spaces.Box(0.01, 10.0, (1,), np.float32),
            "depth": spaces.Box(1, 9, (1,), np.float32),
            "deep": spaces.Discrete(2),
        }
    )
    env.step_raw({"tile": 8, "rate": 1.0, "depth": 2, "one": 5})
    assert study.workload.calls[0]["one"] == 5
    env.close()


@pytest.mark.parametrize(("low", "high"), [("0", "inf"), ("nan", "1"), ("2", "1"), ("1", "1")])
def test_g02_a_range_without_finite_bounds_is_rejected_at_load_time(tmp_path, low, high):
    assert "[run.workload] args" in load_error(tmp_path, batch_scenario(args=f"x = {{ low = {low}, high = {high} }}"))


@pytest.mark.parametrize("view", ["dict", "flat"])
def test_g03_decoding_inverts_encoding(study, view):
    env = GymnasiumAdapter(study, view=view)
    for n in range(50):
        action = study.space.sample(1, n)
        decoded = env.decode_action(env.encode_action(action))
        assert decoded == {**action, "rate": pytest.approx(action["rate"], rel=1e-5)}
    env.close()


def test_g03_jitter_does_not_defeat_the_cache(tmp_path):
    env = GymnasiumAdapter(search_env(tmp_path, {"n": {"low": 0, "high": 9, "dtype": "int"}}, lambda n: n), view="dict")
    for jitter in (-0.3, 0.0, 0.3):
        env.step({"n": np.array([4 + jitter], np.float32)})
    assert len(env.inner.workload.calls) == 1
    assert [trial.cached_from for trial in env.inner.book.ledger.trials()] == [None, "1", "1"]
    env.close()


def test_g04_an_invalid_action_is_a_value_error_that_names_the_parameter(study):
    env = GymnasiumAdapter(study, view="dict")
    good = env.encode_action({"tile": 8, "rate": 1.0, "depth": 2})
    for action, words in (
        ({**good, "tile": 3}, "tile: index 3"),
        ({**good, "more": 1}, "unknown key 'more'"),
        ({name: good[name] for name in ("tile", "rate", "deep")}, "missing key 'depth'"),
    ):
        with pytest.raises(ValueError, match=words):
            env.step(action)
    with pytest.raises(ValueError, match="tile: 9 is not one of 8, 16, 32"):
        env.encode_action({"tile": 9, "rate": 1.0, "depth": 2})
    with pytest.raises(ValueError, match="missing fixed parameter 'one'"):
        env.step_raw({"tile": 8, "rate": 1.0, "depth": 2})
    assert study.book.step == 0
    env.close()


def test_g05_the_context_has_a_leaf_for_each_drawn_parameter(study):
    env = GymnasiumAdapter(study, view="dict")
    assert env.observation_space["observation"] == spaces.Box(-np.inf, np.inf, (1,), np.float32)
    observation, info = env.reset()
    assert observation["context"]["drop"] == pytest.approx(info["env_params"]["drop"])
    assert observation["context"]["size"] == pytest.approx(np.log(info["env_params"]["size"]))
    assert ["x", "y"][observation["context"]["kind"]] == info["env_params"]["kind"]
    env.close()


def test_g05_live_and_batch_observations_have_the_same_context(tmp_path):
    env_params = {"drop": [0.1, 0.2], "size": [1, 10, 100], "kind": ["x", "y"]}
    encodings = {name: how["encoding"] for name, how in DRAWN.items()}
    for view in ("dict", "flat"):
        one = LiveAdapter(live_env(tmp_path / view, drawn=env_params, encodings=encodings), view=view)
        other = GymnasiumAdapter(search_env(tmp_path / f"{view} batch", ARGUMENTS, score, env_params=DRAWN), view=view)
        assert one.observation_space["observation"] == LineServer.observation_space
        assert one.observation_space["context"] == other.observation_space["context"]
        (live_observation, live_info), (batch_observation, batch_info) = one.reset(), other.reset()
        assert live_info["env_params"] == batch_info["env_params"]  # both draw with the seed 0
        assert str(live_observation["context"]) == str(batch_observation["context"])
        one.close()
        other.close()


def test_g05_the_parts_of_a_servers_observation_keep_their_order(tmp_path):
    space = spaces.Dict([("b", spaces.Discrete(2)), ("a", spaces.Box(0, 1, (2,)))])
    env = LiveAdapter(live_env(tmp_path, SampleServer(space), drawn=SPEEDS))
    assert list(env.observation_space.spaces) == ["b", "a", "context"]
    observation, _ = env.reset()
    assert observation in env.observation_space
    assert list(observation) == ["b", "a", "context"]
    env.close()


@pytest.mark.parametrize(
    ("encoding", "values", "words"),
    [
        ("scalar", '["a", "b"]', "candidates that are not numbers; encoding = 'scalar'"),
        ("log", "[0, 1]", "has the candidate 0; encoding = 'log' needs numbers above 0"),
        ("log", "[true, false]", "not numbers"),
        ("bent", "[1, 2]", "encoding"),
    ],
)
def test_g05_an_impossible_encoding_is_rejected_at_load_time(tmp_path, encoding, values, words):
    more = f'[run.env_params.wind]\nencoding = "{encoding}"'
    assert words in load_error(tmp_path, batch_scenario(args=f"x = [1, 2]\nwind = {values}", more=more))
