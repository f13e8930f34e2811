"""`loopwright.make`: a run of a scenario as an environment for a user's algorithm."""

import tempfile
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

import loopwright
from loopwright.core.errors import OutputBusy, ScenarioError
from loopwright.envs.live.server import ServerError
from loopwright.reports.page import write_all

DRAWN = {
    "workload": '[run.workload]\ntype = "command"\ncommand = "echo y={x} of {size}"\n'
    'metrics = { y = { regex = "y=([0-9])" } }',
    "args": "[run.workload.args]\nx = [1, 2]\nsize = [10, 20]",
    "more": "[run.env_params.size]",
}
LIVE = {
    "reward": "",
    "workload": '[run.live]\nenv_class = "gymnasium:CartPole-v1"\nisolate = false',
    "args": "",
    "agent": 'agent = { type = "ppo", trials = 9 }',
}


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Temporary directories in a place that the test can list."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def numbers(directory: Path, run: str = "first"):
    with loopwright.Ledger.read(directory / run / "ledger.db") as ledger:
        return [trial.number for trial in ledger.trials()]


def test_a_run_is_an_environment(write):
    env = loopwright.make(write(**DRAWN))
    assert isinstance(env, gymnasium.Env)
    assert env.action_space == spaces.MultiDiscrete([2])
    env.reset(seed=1)
    *_, info = env.step(np.array([0]))
    assert (info["trial"], info["outcome"], info["metrics"]["y"]) == (1, "ok", 1.0)
    env.close()


def test_the_agents_budget_does_not_limit_the_caller(write):
    env = loopwright.make(write())
    for n in range(1, 8):
        *_, terminated, truncated, info = env.step(np.array([n % 2]))
        assert (info["trial"], terminated, truncated) == (n, True, False)
    env.close()


def test_a_live_run_can_be_given_an_object(write):
    own = gymnasium.make("CartPole-v1")
    env = loopwright.make(write(**LIVE), server=own)
    assert env.action_space is own.action_space
    env.reset(seed=1)
    assert env.step(1)[-1]["trial"] == 1
    env.close()
    with pytest.raises(ServerError, match="'int' is not a GymServer: it has no observation_space"):
        loopwright.make(write(**LIVE), server=3)


def test_without_an_output_nothing_is_left_behind(write, temporary):
    env = loopwright.make(write())
    assert len(list(temporary.iterdir())) == 1
    env.close()
    env.close()
    assert list(temporary.iterdir()) == []


def test_a_failed_make_leaves_nothing_behind(write, temporary):
    with pytest.raises(ValueError, match="view 'discrete' needs"):
        loopwright.make(write(args="[run.workload.args]\nx = { low = 0, high = 1 }"), view="discrete")
    assert list(temporary.iterdir()) == []


def test_an_output_is_kept_and_resumed(write, tmp_path):
    for expected in ([1], [1, 2]):
        env = loopwright.make(write(**DRAWN), output=tmp_path / "out")
        env.step(np.array([0]))
        env.close()
        assert numbers(tmp_path / "out") == expected
    assert write_all(tmp_path / "out") == 0
    assert (tmp_path / "out" / "first" / "env.csv").read_text().startswith("trial,size")


def test_an_output_is_held_by_one_at_a_time(write, tmp_path):
    env = loopwright.make(write(), output=tmp_path / "out")
    with pytest.raises(OutputBusy, match="is in use"):
        loopwright.make(write(), output=tmp_path / "out")
    env.close()
    loopwright.make(write(), output=tmp_path / "out").close()


@pytest.mark.parametrize(
    ("view", "kind"), [("dict", spaces.Dict), ("flat", spaces.MultiDiscrete), ("discrete", spaces.Discrete)]
)
def test_views(write, view, kind):
    env = loopwright.make(write(), view=view)
    assert isinstance(env.action_space, kind)
    env.step(env.action_space.sample())
    env.close()


def test_it_passes_gymnasiums_checker_and_can_be_made_from_its_spec(write):
    env = loopwright.make(write(**DRAWN))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*A Box observation space")
        check_env(env)
    twin = gymnasium.make(env.spec)
    assert twin.unwrapped.action_space == env.action_space
    twin.close()
    env.close()


def test_several_slots(write):
    env = loopwright.make(write(**DRAWN), num_envs=3)
    assert isinstance(env, gymnasium.vector.VectorEnv)
    env.reset(seed=0)
    *_, infos = env.step(np.array([[0], [1], [0]]))
    assert list(infos["trial"]) == [1, 2, 3]
    env.close()


def test_a_live_run_has_the_spaces_of_its_server(write, tmp_path):
    env = loopwright.make(write(**LIVE), output=tmp_path / "out")
    assert env.action_space == spaces.Discrete(2)
    env.reset(seed=1)
    assert [env.step(0)[4]["trial"] for _ in range(3)] == [1, 2, 3]
    env.close()
    assert numbers(tmp_path / "out") == [1, 2, 3]
    env = loopwright.make(write(**LIVE), num_envs=2, output=tmp_path / "two")
    env.reset(seed=1)
    assert env.step([0, 1])[4]["trial"].tolist() == [1, 2]
    env.close()
    assert numbers(tmp_path / "two") == [1, 2]


def test_missing_things_are_named(write):
    with pytest.raises(ScenarioError, match=r"there is no run 'other' with an agent. Runs: first."):
        loopwright.make(write(), run="other")
    with pytest.raises(ScenarioError, match="Runs: none"):
        loopwright.make(write(agent="", args="[run.workload.args]\nx = 1"))
    with pytest.raises(ValueError, match="unknown view 'round'; use one of flat, dict, discrete"):
        loopwright.make(write(), view="round")
    with pytest.raises(TypeError, match="env must be a class, not 'windy:Windy'"):
        loopwright.make(write(), env="windy:Windy")
