"""An environment of one's own: named in a scenario, or passed to `make`."""

import pytest
from tests.contracts.gymnasium_harness import batch_scenario, live_scenario, load_error, write_scenario
from tests.contracts.harness import trials

import loopwright
from loopwright.envs import SearchEnv
from loopwright.envs.gym.adapter import GymnasiumAdapter
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.load import load

OWN = """
from loopwright import ObsLeafDescriptor
from loopwright.envs import LiveEnv, SearchEnv

class Described:
    seen = []

    def structured_observation_descriptors(self):
        return {"last": ObsLeafDescriptor.box(1), "storm": ObsLeafDescriptor.discrete(2)}

    def encode_observation(self, metrics, regime):
        Described.seen.append((dict(metrics), dict(regime)))
        return {"last": [metrics.get("y") or 0.0], "storm": int(regime.get("wind", 0) == 2)}

class Windy(Described, SearchEnv): ...
class LiveWindy(Described, LiveEnv): ...

class Delegates(Described):
    '''Inherits nothing: has the methods and attributes of a SearchEnv by delegation.'''
    def __init__(self, *args, **options):
        self._inner = SearchEnv(*args, **options)

    def __getattr__(self, name):
        return getattr(self._inner, name)

number = 5
"""
WIND = {"args": "x = [1, 2]\nwind = [1, 2]", "more": "[run.env_params.wind]"}


def named(env, text):
    return text.replace('\nname = "r"\n', f'\nname = "r"\nenv = "{env}"\n').replace(
        '\nname = "p"\n', f'\nname = "p"\nenv = "{env}"\n'
    )


@pytest.fixture
def own(tmp_path):
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    return name


@pytest.mark.parametrize("kind", ["Windy", "Delegates"])
def test_g05_an_environment_named_in_a_scenario_observes_metrics_and_regime(tmp_path, own, kind):
    env = loopwright.make(write_scenario(tmp_path, named(f"{own}:{kind}", batch_scenario(**WIND))), view="dict")
    assert isinstance(env, GymnasiumAdapter)
    _, info = env.reset()
    observation, *_ = env.step_raw({"x": 2})
    assert observation["context"]["last"].tolist() == [2.0]
    assert env.inner.seen[0] == ({"y": None}, info["env_params"])
    assert env.inner.seen[-1][0] == {"y": 2.0}
    env.close()


def test_a_run_uses_the_environment_that_it_names(tmp_path, own):
    path = write_scenario(tmp_path, named(f"{own}:Windy", batch_scenario(**WIND)))
    assert dispatch(load(path), tmp_path / "out") == 0
    assert len(trials(tmp_path)) == 4
    live = live_scenario(agent='agent = { type = "a2c", trials = 16, rollout = 8 }')
    assert dispatch(load(write_scenario(tmp_path, named(f"{own}:LiveWindy", live))), tmp_path / "live") == 0


def test_an_environment_is_passed_to_make(tmp_path):
    class Mine(SearchEnv): ...

    env = loopwright.make(write_scenario(tmp_path, batch_scenario()), env=Mine)
    assert isinstance(env.inner, Mine)
    env.close()


@pytest.mark.parametrize(("name", "words"), [("number", "cannot be called"), ("Nothing", "no attribute 'Nothing'")])
def test_an_unusable_environment_is_refused_at_load_time(tmp_path, own, name, words):
    message = load_error(tmp_path, named(f"{own}:{name}", batch_scenario()))
    assert "[[run]] env" in message
    assert words in message
