"""The contracts G01–G12 of gymnasium and live RL, and what S03, S04, R05 and R07 mean there."""

import csv
import inspect
import json
import subprocess
import sys
import textwrap
import warnings

import gymnasium
import numpy as np
import pytest
import stable_baselines3.common.env_checker as sb3_checker
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stable_baselines3 import PPO

import loopwright
from loopwright.agents.rl.observation_wrappers import wrap_for_library
from loopwright.agents.rl.sb3 import SlotVecEnv
from loopwright.core.errors import ScenarioError
from loopwright.core.outcome import Outcome
from loopwright.core.reward import Identity, Objectives
from loopwright.envs.gym import adapter as adapter_module
from loopwright.envs.gym.adapter import Driver, GymnasiumAdapter, LiveAdapter, VectorAdapter
from loopwright.envs.live.server import ServerError
from loopwright.envs.search import SearchEnv
from loopwright.ledger.trial_book import TrialBook
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.load import load
from loopwright.spaces.parameter import Range, parameter
from loopwright.spaces.space import Draws, EnvParamConfig
from tests.envs.test_codec import made_spaces
from tests.envs.worlds import Called, Line, Shown, book_in, live, world

UNREASONABLE = (
    "A Box observation space (min|max)imum value is -?infinity",  # a metric has no bounds that are known
    "For Box action spaces, we recommend",  # the named view has the native bounds; the flat one is normalised
    "Your action space has dtype float64",  # float32 does not tell the integers of a wide range apart
)


def checked(env, checker=check_env, **options):
    """Passes a checker; every warning is an error, but for those that a run with metrics cannot heed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for message in UNREASONABLE:
            warnings.filterwarnings("ignore", message=f".*{message}")
        checker(env, **options)


ARGUMENTS = {
    "tile": [8, 16, 32],
    "rate": {"low": 0.01, "high": 10.0, "log": True},
    "depth": {"low": 1, "high": 9, "dtype": "int"},
    "deep": {"values": ["a", "b"], "when": "depth > 4"},
    "drop": [0.1, 0.2],
    "size": [1, 10, 100],
    "kind": ["x", "y"],
    "one": [5],
}
DRAWN = {"drop": {"encoding": "scalar"}, "size": {"encoding": "log"}, "kind": {"encoding": "categorical"}}


def score(tile, rate, depth, drop, size, kind, one, deep=None):
    return tile + rate + depth + drop


@pytest.fixture
def study(tmp_path):
    return world(tmp_path, ARGUMENTS, score, env_params=DRAWN)


@pytest.mark.parametrize("view", ["dict", "flat"])
def test_g01_the_adapter_passes_gymnasiums_checker(study, view):
    env = GymnasiumAdapter(study, view=view)
    assert isinstance(env, gymnasium.Env)
    checked(env, skip_close_check=True)
    assert [trial.outcome for trial in study.book.ledger.trials()] == [Outcome.OK] * study.book.step
    env.close()


def test_g01_the_flat_view_passes_sb3s_checker(study):
    env = GymnasiumAdapter(study, view="flat")
    checked(env, sb3_checker.check_env)
    env.close()


@pytest.mark.parametrize("view", ["flat", "discrete"])
def test_g01_lists_alone_pass_both_in_every_view(tmp_path, view):
    env = GymnasiumAdapter(world(tmp_path, {"x": [1, 2], "z": ["a", "b", "c"]}, lambda x, z: x), view=view)
    checked(env, skip_close_check=True)
    checked(env, sb3_checker.check_env)
    env.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(space=made_spaces(), data=st.data(), view=st.sampled_from(["dict", "flat"]))
def test_g01_any_space_passes(tmp_path_factory, space, data, view):
    candidates = [name for name in space.tunable if name.startswith("list")][1:]
    drawn = data.draw(st.sets(st.sampled_from(candidates))) if candidates else set()
    space = type(space)({**space.parameters, "d": parameter([1, 2.5, 30])}, (), frozenset({*drawn, "d"}))
    configs = {name: EnvParamConfig() for name in drawn}
    configs["d"] = EnvParamConfig(encoding=data.draw(st.sampled_from(["categorical", "scalar", "log"])))
    env = SearchEnv(
        book_in(tmp_path_factory.mktemp("any")),
        space=space,
        workload=Called(lambda **_: 1.0),
        draws=Draws(0, space.parameters, configs),
        objectives=Objectives((Identity(metrics=("y",)),)),
        metric_names=("y", "z"),
    )
    adapter = GymnasiumAdapter(env, view=view)
    checked(adapter, skip_close_check=True)
    if view == "flat":
        checked(adapter, sb3_checker.check_env)
    adapter.close()
    env.book.ledger.close()


def test_g01_a_live_environment_passes_both(tmp_path):
    env = LiveAdapter(live(tmp_path, gymnasium.make("CartPole-v1").unwrapped))
    checked(env, skip_close_check=True)
    checked(env, sb3_checker.check_env)
    env.close()


SPEEDS = {"speed": [1, 2.5, 30], "wind": ["calm", "storm"]}
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
def test_g01_a_live_environment_with_a_regime_passes_both(tmp_path, view):
    server = gymnasium.make("CartPole-v1").unwrapped
    env = LiveAdapter(live(tmp_path, server, drawn=SPEEDS), view=view)
    checked(env, skip_close_check=True)
    if view == "flat":
        checked(env, sb3_checker.check_env)
    env.close()


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(), view=st.sampled_from(["dict", "flat"]), encoding=st.sampled_from(["categorical", "scalar", "log"])
)
def test_g01_whatever_a_server_shows_passes_with_the_regime_beside_it(tmp_path_factory, data, view, encoding):
    nested = data.draw(st.booleans())
    shown = data.draw(nested_spaces if nested else st.one_of(plain_spaces, named_spaces))
    inner = live(tmp_path_factory.mktemp("any"), Shown(shown), drawn=SPEEDS, encodings={"speed": encoding})
    env = LiveAdapter(inner, view=view)
    checked(env, skip_close_check=True)
    if view == "flat":
        # SB3 takes nothing nested: what its learner gets is one row then.
        checked(wrap_for_library(env, "sb3") if nested else env, sb3_checker.check_env)
        checked(wrap_for_library(env, "rllib"), sb3_checker.check_env)
    env.close()
    inner.book.ledger.close()


def test_g01_unwrapped_keeps_gymnasiums_meaning(study):
    env = GymnasiumAdapter(study)
    assert env.unwrapped is env
    assert gymnasium.wrappers.TimeLimit(env, 5).unwrapped is env
    env.close()


def test_g01_a_vector_gives_what_its_spaces_say(study):
    env = VectorAdapter(study, 2, view="dict")
    seen, _ = env.reset(seed=1)
    assert seen in env.observation_space
    seen, rewards, terminated, _, _ = env.step(env.action_space.sample())
    assert seen in env.observation_space
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
def test_g02_a_range_without_finite_bounds_is_refused_at_load_time(tmp_path, low, high):
    assert "[run.workload] args" in refused(tmp_path, batch(args=f"x = {{ low = {low}, high = {high} }}"))


@pytest.mark.parametrize("view", ["dict", "flat"])
def test_g03_what_is_encoded_is_decoded(study, view):
    env = GymnasiumAdapter(study, view=view)
    for n in range(50):
        action = study.space.sample(1, n)
        decoded = env.decode_action(env.encode_action(action))
        assert decoded == {**action, "rate": pytest.approx(action["rate"], rel=1e-5)}
    env.close()


def test_g03_jitter_does_not_defeat_the_cache(tmp_path):
    env = GymnasiumAdapter(world(tmp_path, {"n": {"low": 0, "high": 9, "dtype": "int"}}, lambda n: n), view="dict")
    for jitter in (-0.3, 0.0, 0.3):
        env.step({"n": np.array([4 + jitter], np.float32)})
    assert len(env.inner.workload.calls) == 1
    assert [trial.cached_from for trial in env.inner.book.ledger.trials()] == [None, "1", "1"]
    env.close()


def test_g04_what_does_not_fit_is_a_value_error_that_names_it(study):
    env = GymnasiumAdapter(study, view="dict")
    good = env.encode_action({"tile": 8, "rate": 1.0, "depth": 2})
    for action, words in (
        ({**good, "tile": 3}, "tile: index 3"),
        ({**good, "more": 1}, "unknown key 'more'"),
        ({name: good[name] for name in ("tile", "rate", "deep")}, "missing key 'depth'"),
    ):
        with pytest.raises(ValueError, match=words):
            env.step(action)
    with pytest.raises(ValueError, match="tile: 9 is none of 8, 16, 32"):
        env.encode_action({"tile": 9, "rate": 1.0, "depth": 2})
    with pytest.raises(ValueError, match="missing fixed parameter 'one'"):
        env.step_raw({"tile": 8, "rate": 1.0, "depth": 2})
    assert study.book.step == 0
    env.close()


def test_g05_the_context_holds_each_drawn_parameter_by_its_leaf(study):
    env = GymnasiumAdapter(study, view="dict")
    assert env.observation_space["observation"] == spaces.Box(-np.inf, np.inf, (1,), np.float32)
    seen, info = env.reset()
    assert seen["context"]["drop"] == pytest.approx(info["env_params"]["drop"])
    assert seen["context"]["size"] == pytest.approx(np.log(info["env_params"]["size"]))
    assert ["x", "y"][seen["context"]["kind"]] == info["env_params"]["kind"]
    env.close()


def test_g05_the_context_of_a_live_observation_is_that_of_a_batch_one(tmp_path):
    drawn = {"drop": [0.1, 0.2], "size": [1, 10, 100], "kind": ["x", "y"]}
    encodings = {name: how["encoding"] for name, how in DRAWN.items()}
    for view in ("dict", "flat"):
        one = LiveAdapter(live(tmp_path / view, drawn=drawn, encodings=encodings), view=view)
        other = GymnasiumAdapter(world(tmp_path / f"{view} batch", ARGUMENTS, score, env_params=DRAWN), view=view)
        assert one.observation_space["observation"] == Line.observation_space
        assert one.observation_space["context"] == other.observation_space["context"]
        (seen, told), (beside, known) = one.reset(), other.reset()
        assert told["env_params"] == known["env_params"]  # both draw with the seed 0
        assert str(seen["context"]) == str(beside["context"])
        one.close()
        other.close()


def test_g05_the_parts_of_a_server_stay_where_they_are(tmp_path):
    shown = spaces.Dict([("b", spaces.Discrete(2)), ("a", spaces.Box(0, 1, (2,)))])
    env = LiveAdapter(live(tmp_path, Shown(shown), drawn=SPEEDS))
    assert list(env.observation_space.spaces) == ["b", "a", "context"]
    seen, _ = env.reset()
    assert seen in env.observation_space
    assert list(seen) == ["b", "a", "context"]
    env.close()


@pytest.mark.parametrize(
    ("encoding", "values", "words"),
    [
        ("scalar", '["a", "b"]', "candidates that are no numbers; encoding = 'scalar'"),
        ("log", "[0, 1]", "has the candidate 0; encoding = 'log' needs numbers above 0"),
        ("log", "[true, false]", "no numbers"),
        ("bent", "[1, 2]", "encoding"),
    ],
)
def test_g05_an_encoding_that_a_value_has_not_is_refused_at_load_time(tmp_path, encoding, values, words):
    more = f'[run.env_params.wind]\nencoding = "{encoding}"'
    assert words in refused(tmp_path, batch(args=f"x = [1, 2]\nwind = {values}", more=more))


def test_g06_no_adapter_writes_the_counter():
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


def test_s03_sb3_in_its_own_loop_keeps_numbers_rising(study):
    env = GymnasiumAdapter(study, view="flat")
    PPO("MultiInputPolicy", env, n_steps=8, batch_size=8, n_epochs=1, device="cpu").learn(16)
    assert [trial.number for trial in study.book.ledger.trials()] == list(range(1, 17))
    assert [trial.draw for trial in study.book.ledger.trials()] == list(range(1, 17))
    env.close()


def test_s03_several_slots_take_a_number_each(study):
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
    env = GymnasiumAdapter(world(tmp_path, {"x": [1, 2]}, lambda x: x, constraints=("x < 2",)))
    assert [env.step_raw({"x": x})[4]["trial"] for x in (1, 1, 2)] == [1, 2, 3]
    assert [(t.number, t.outcome, t.cached_from) for t in env.inner.book.ledger.trials()] == [
        (1, "ok", None),
        (2, "ok", "1"),
        (3, "infeasible", None),
    ]
    env.close()
    walk = LiveAdapter(live(tmp_path / "live"))
    walk.reset()
    assert [walk.step(1)[4]["trial"] for _ in range(3)] == [1, 2, 3]
    walk.close()
    assert [trial.number for trial in walk.inner.book.ledger.trials()] == [1, 2, 3]


def test_r05_the_regime_reaches_all_that_should_know_it(study):
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
    seen, _ = env.reset()
    env.action_space.seed(0)
    for n in range(20):
        shown = seen["context"]
        if n % 3 == 0:
            env.reset()  # in between, as some libraries do
        seen, *_, info = env.step(env.action_space.sample())
        assert shown["drop"] == pytest.approx(info["env_params"]["drop"])
        assert ["x", "y"][shown["kind"]] == info["env_params"]["kind"]
    env.close()


@pytest.mark.parametrize("record", ["steps", "episodes"])
def test_r05_a_live_regime_reaches_server_ledger_info_and_context(tmp_path, record):
    env = LiveAdapter(live(tmp_path, drawn=SPEEDS, encodings={"speed": "scalar"}, record=record), view="dict")
    known = []
    for _ in range(6):
        seen, info = env.reset()
        over = False
        while not over:
            assert seen["context"]["speed"] == pytest.approx(info["env_params"]["speed"])
            assert SPEEDS["wind"][seen["context"]["wind"]] == info["env_params"]["wind"]
            assert env.inner.server.resets[-1]["env_params"] == info["env_params"]
            seen, _, over, _, info = env.step(1)
        known.append(info["env_params"])
    env.close()
    assert [one["regime"] for one in env.inner.book.ledger.episodes()] == known
    assert len({str(regime) for regime in known}) > 1
    rows = [row.regime for row in env.inner.book.ledger.trials()]
    assert rows == [regime for regime in known for _ in range(5 if record == "steps" else 1)]


def test_r05_a_step_that_failed_still_shows_its_regime(tmp_path):
    env = LiveAdapter(live(tmp_path, Line({2: 5}), drawn=SPEEDS))
    first, _ = env.reset()
    env.step(1)
    seen, _, _, truncated, info = env.step(1)
    assert (truncated, info["outcome"]) == (True, "metric_missing")
    assert seen in env.observation_space
    np.testing.assert_array_equal(seen["context"], first["context"])
    env.close()


def test_r05_who_writes_into_an_observation_changes_no_other(tmp_path):
    env = LiveAdapter(live(tmp_path, drawn=SPEEDS))
    first, _ = env.reset()
    kept = first["context"].copy()
    first["context"][:] = 7
    np.testing.assert_array_equal(env.step(1)[0]["context"], kept)
    env.close()


def test_r07_the_last_observation_of_a_live_episode_has_its_own_regime_and_reset_the_next_one(tmp_path):
    env = LiveAdapter(live(tmp_path, drawn={"speed": list(range(50))}, encodings={"speed": "scalar"}))
    shown = []
    for _ in range(8):
        first, told = env.reset()
        again, _ = env.reset()  # as some libraries do
        seen = [first, again, *(env.step(1)[0] for _ in range(5))]
        assert {float(one["context"][0]) for one in seen} == {float(told["env_params"]["speed"])}
        shown.append(told["env_params"]["speed"])
    env.close()
    assert [one["regime"]["speed"] for one in env.inner.book.ledger.episodes()] == shown
    assert len(set(shown)) > 4


@pytest.mark.parametrize("view", ["dict", "flat"])
def test_r07_make_shows_the_regime_of_a_live_run(tmp_path, view):
    path = written(tmp_path, stepped(more=DRAWN_SPEED + '\nencoding = "scalar"'))
    env = loopwright.make(path, view=view)
    for _ in range(3):
        seen, info = env.reset()
        shown = seen["context"]["speed"] if view == "dict" else seen["context"]
        assert shown == pytest.approx(info["env_params"]["speed"])
        assert env.step(1)[4]["env_params"] == info["env_params"]
    env.close()


def test_r07_a_live_reset_tells_the_regime_of_the_steps_that_follow(tmp_path):
    env = LiveAdapter(live(tmp_path, drawn={"speed": [1, 2, 3]}))
    for _ in range(6):
        _, told = env.reset()
        for _ in range(2):
            assert env.step(1)[4]["env_params"] == told["env_params"]
    env.close()


WITHOUT = """
    import sys
    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("gymnasium", "stable_baselines3", "torch", "ray"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])
    sys.meta_path.insert(0, Blocked())
    import loopwright, loopwright.cli
    from pathlib import Path
    from loopwright.core.errors import MissingExtra, ScenarioError
    for name in set(loopwright.__all__) - {"GymnasiumAdapter"}:
        getattr(loopwright, name)
    for use in (lambda: loopwright.GymnasiumAdapter, lambda: loopwright.make("scenario.toml")):
        try:
            use()
        except MissingExtra as error:
            assert isinstance(error, ImportError)
            print(error)
    try:
        loopwright.load(Path(sys.argv[1]))
    except ScenarioError as error:
        print(error)
"""


def test_g07_without_gymnasium_the_package_imports_and_names_the_extra(tmp_path):
    path = written(tmp_path, batch('{ type = "ppo", trials = 50 }'))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT), str(path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    named, made, *refusal = done.stdout.splitlines()
    assert "GymnasiumAdapter needs an extra that is not installed. Run: pip install 'loopwright[rl]'" in named
    assert "loopwright.make needs an extra" in made
    assert "[run.agent] library: agent 'ppo' needs an extra" in " ".join(refusal)


# -- whole campaigns ----------------------------------------------------------------------------------------------

WORK = """
def score(x, wind=0):
    return {"y": float(x)}
"""

TOY = """
from gymnasium import spaces
from tests.envs.worlds import Line

class Server(Line):
    made = []

    def __init__(self, speed=1.0, color="red"):
        super().__init__()
        Server.made.append((speed, color))

class Occupied(Line):
    observation_space = spaces.Dict({"context": spaces.Discrete(2)})

class Hidden(Line):
    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Dict({"context": spaces.Discrete(2)})

class NoServer:
    def reset(self): ...

number = 5
"""


def batch(agent='{ type = "random", trials = 4 }', args="x = [1, 2]", more="", name="r"):
    return f"""
name = "test"
[[run]]
name = "{name}"
{f"agent = {agent}" if agent else ""}
reward = {{ type = "identity", metrics = ["y"] }}
[run.workload]
type = "python"
function = "toy_work:score"
metrics = ["y"]
[run.workload.args]
{args}
{more}
"""


def stepped(env_class="toy:Server", more="", agent='agent = { type = "ppo", trials = 23, rollout = 8 }', name="p"):
    return f"""
name = "test"
[[run]]
name = "{name}"
{agent}
[run.live]
env_class = "{env_class}"
{more}
"""


@pytest.fixture(autouse=True)
def fresh_toy():
    yield
    sys.modules.pop("toy", None)


def written(directory, text):
    (directory / "toy.py").write_text(TOY)
    (directory / "toy_work.py").write_text(WORK)
    (directory / "scenario.toml").write_text(text)
    return directory / "scenario.toml"


def refused(directory, text):
    with pytest.raises(ScenarioError) as raised:
        load(written(directory, text))
    return str(raised.value)


DRAWN_SPEED = "[run.live.args]\nspeed = [1.0, 2.0]\ncolor = 'blue'\nunused = 7\n[run.env_params.speed]"


@pytest.mark.parametrize("path", ["toy:Server", "toy.Server"])
def test_g08_a_live_run_needs_no_sweep_and_hands_over_what_the_class_takes(tmp_path, path):
    assert dispatch(load(written(tmp_path, stepped(path, DRAWN_SPEED))), tmp_path / "out") == 0
    assert sys.modules["toy"].Server.made == [(1.0, "blue")]


def test_g08_an_object_can_be_handed_over_in_python(tmp_path):
    server = Line()
    env = LiveAdapter(live(tmp_path, server))
    assert env.observation_space is server.observation_space
    env.reset()
    env.step(1)
    assert server.steps == 1
    env.close()


def test_g08_a_server_that_has_a_context_of_its_own_leaves_no_place_for_the_regime(tmp_path):
    said = refused(tmp_path, stepped("toy:Occupied", DRAWN_SPEED))
    assert "[run.live] env_class: the server's observations have a part 'context'" in said
    load(written(tmp_path, stepped("toy:Occupied")))  # nothing is drawn: it may show what it likes
    assert "have a part 'context'" in refused(tmp_path, stepped("toy:Hidden", DRAWN_SPEED))  # set in __init__
    with pytest.raises(ServerError, match=r"have a part 'context'.*give it another name"):
        live(tmp_path, Shown(gymnasium.spaces.Dict({"context": gymnasium.spaces.Discrete(2)})), drawn={"speed": [1, 2]})


PLAIN = batch(agent="", args="x = 1", name="plain").replace('name = "test"\n', "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (batch() + PLAIN, "runs with and without an agent are mixed; plain has none"),
        (stepped() + PLAIN, "runs with and without an agent are mixed; plain has none"),
        (stepped(agent=""), "[run.agent]: is missing; a live environment needs an agent"),
        (stepped(agent='agent = { type = "grid" }'), "'grid' cannot act in a live environment; ppo"),
        (stepped().replace("[run.live]", "repeats = 2\n[run.live]"), "repeats"),
        (stepped().replace("[run.live]", 'cache = "shared"\n[run.live]'), "cache"),
        (stepped(more='[run.workload]\ntype = "command"'), "a workload or a live environment, not both"),
        (stepped().replace("[run.live]", 'depends_on = ["x"]\n[run.live]'), "unknown key 'depends_on'"),
        (stepped(more='address = "tcp://localhost:1"'), "give either env_class (in process) or address"),
        (stepped(more="[run.live.args]\nspeed = [1, 2]"), "args.speed: has several values"),
        (
            stepped().replace("[run.live]", 'reward = { type = "identity", metrics = ["y"] }\n[run.live]'),
            "a live environment gives its own reward",
        ),
        (stepped(more="[run.env_params.sped]"), "[run.env_params.sped]: there is no argument 'sped'"),
    ],
)
def test_g09_what_cannot_be_is_refused_before_anything_starts(tmp_path, text, words):
    assert words in refused(tmp_path, text)
    assert not (tmp_path / "out").exists()


def test_g09_live_and_batch_runs_go_through_one_dispatcher(tmp_path):
    text = batch() + stepped().replace('name = "test"\n', "")
    assert dispatch(load(written(tmp_path, text)), tmp_path / "out") == 0
    assert (tmp_path / "out" / "r" / "trajectory.csv").exists()
    assert (tmp_path / "out" / "p" / "trajectory.csv").exists()


@pytest.mark.parametrize("record", ["steps", "episodes"])
def test_g10_numbers_keep_rising_over_episodes_and_the_files_are_in_the_runs_folder(tmp_path, record):
    text = stepped(more=f'record = "{record}"\n{DRAWN_SPEED}')
    assert dispatch(load(written(tmp_path, text)), tmp_path / "out") == 0
    with loopwright.Ledger.read(tmp_path / "out" / "p" / "ledger.db") as ledger:
        found, episodes = list(ledger.trials()), list(ledger.episodes())
    assert [(one["first"], one["last"]) for one in episodes] == [(1, 5), (6, 10), (11, 15), (16, 20), (21, 23)]
    assert len({one["regime"]["speed"] for one in episodes}) == 2
    with (tmp_path / "out" / "p" / "trajectory.csv").open() as file:
        trajectory = list(csv.DictReader(file))
    with (tmp_path / "out" / "p" / "env.csv").open() as file:
        drawn = list(csv.DictReader(file))
    numbers = list(range(1, 24)) if record == "steps" else [5, 10, 15, 20, 23]
    assert [int(row["trial"]) for row in trajectory] == [int(row["trial"]) for row in drawn] == numbers
    assert [row.number for row in found] == numbers
    if record == "episodes":
        assert [json.loads(row["observation"])["first"] for row in trajectory] == [1, 6, 11, 16, 21]


@pytest.mark.parametrize(
    ("env_class", "words"),
    [
        ("Server", "has no module part"),
        ("toy:Sever", "has no attribute 'Sever'"),
        ("toy:number", "is of type int"),
        ("toy:NoServer", "it has no method step, close"),
        ("no_such_module:Server", "there is no module 'no_such_module'"),
        ("gymnasium:NoSuchEnv-v1", "gymnasium has no environment"),
    ],
)
def test_g11_a_bad_class_fails_at_load_time_with_the_reason(tmp_path, env_class, words):
    said = refused(tmp_path, stepped(env_class))
    assert "[run.live] env_class" in said
    assert words in said


def test_g12_a_batch_step_ends_its_episode_and_the_budget_truncates_it(tmp_path):
    env = GymnasiumAdapter(world(tmp_path, {"x": [1, 2]}, lambda x: x, budget=3))
    answers = [env.step_raw({"x": 1}) for _ in range(3)]
    assert [len(answer) for answer in answers] == [5, 5, 5]
    assert [(terminated, truncated) for _, _, terminated, truncated, _ in answers] == [
        (True, False),
        (True, False),
        (True, True),
    ]
    env.close()


def test_g12_a_live_step_ends_when_its_server_says_so(tmp_path):
    env = LiveAdapter(live(tmp_path))
    env.reset()
    assert [env.step(1)[2:4] for _ in range(5)] == [(False, False)] * 4 + [(True, False)]
    env.close()


def test_g12_the_names_are_public():
    from loopwright import ContinuousSpace, GymnasiumAdapter, GymServer, ObsLeafDescriptor, StructuredObservation

    assert ContinuousSpace is Range
    assert issubclass(GymnasiumAdapter, gymnasium.Env)
    assert GymServer.__doc__
    assert ObsLeafDescriptor.box(2).size == 2
    assert isinstance(Structured(), StructuredObservation)


class Structured:
    def structured_observation_descriptors(self):
        return {}

    def encode_observation(self, regime):
        return {}
