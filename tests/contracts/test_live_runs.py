"""The contracts G07–G12: the extra, live runs from a scenario to files, and episodes."""

import csv
import json
import subprocess
import sys
import textwrap

import gymnasium
import pytest

import loopwright
from loopwright.envs.gym.adapter import GymnasiumAdapter, LiveAdapter
from loopwright.envs.live.server import ServerError
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.load import load
from loopwright.spaces.parameter import Range
from tests.contracts.gymnasium_harness import DRAWN_SPEED, batch_scenario, live_scenario, load_error, write_scenario
from tests.envs.helpers import LineServer, SampleServer, live_env, search_env

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
    path = write_scenario(tmp_path, batch_scenario('{ type = "ppo", trials = 50 }'))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT), str(path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    adapter_error, make_error, *load_error_lines = done.stdout.splitlines()
    assert "GymnasiumAdapter needs an extra that is not installed. Run: pip install 'loopwright[rl]'" in adapter_error
    assert "loopwright.make needs an extra" in make_error
    assert "[run.agent] type: agent 'ppo' needs an extra" in " ".join(load_error_lines)


@pytest.mark.parametrize("path", ["toy:Server", "toy.Server"])
def test_g08_the_constructor_gets_the_arguments_that_it_accepts(tmp_path, path):
    assert dispatch(load(write_scenario(tmp_path, live_scenario(path, DRAWN_SPEED))), tmp_path / "out") == 0
    assert set(sys.modules["toy"].Server.made) == {(1.0, "blue"), (2.0, "blue")}


def test_g08_a_server_object_can_be_passed_in_python(tmp_path):
    server = LineServer()
    env = LiveAdapter(live_env(tmp_path, server))
    assert env.observation_space is server.observation_space
    env.reset()
    env.step(1)
    assert server.steps == 1
    env.close()


def test_g08_a_server_with_its_own_context_cannot_have_env_params(tmp_path):
    message = load_error(tmp_path, live_scenario("toy:DeclaresContext", DRAWN_SPEED))
    assert "[run.live] env_class: the server's observations have a part 'context'" in message
    load(write_scenario(tmp_path, live_scenario("toy:DeclaresContext")))  # nothing is drawn: it may show what it likes
    assert "have a part 'context'" in load_error(
        tmp_path, live_scenario("toy:SetsContextLater", DRAWN_SPEED)
    )  # set in __init__
    with pytest.raises(ServerError, match=r"have a part 'context'.*give it another name"):
        live_env(
            tmp_path,
            SampleServer(gymnasium.spaces.Dict({"context": gymnasium.spaces.Discrete(2)})),
            drawn={"speed": [1, 2]},
        )


PLAIN = batch_scenario(agent="", args="x = 1", name="plain").replace('name = "test"\n', "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (batch_scenario() + PLAIN, "runs with and without an agent are mixed; plain has none"),
        (live_scenario() + PLAIN, "runs with and without an agent are mixed; plain has none"),
        (live_scenario(agent=""), "[run.agent]: is missing; a live environment needs an agent"),
        (live_scenario(agent='agent = { type = "grid" }'), "'grid' cannot act in a live environment; random, ppo"),
        (live_scenario().replace("[run.live]", "repeats = 2\n[run.live]"), "repeats"),
        (live_scenario().replace("[run.live]", 'cache = "shared"\n[run.live]'), "cache"),
        (live_scenario(more='[run.workload]\ntype = "command"'), "a workload or a live environment, not both"),
        (
            live_scenario().replace("[run.live]", 'depends_on = ["x"]\n[run.live]'),
            "[[run]] depends_on: has no meaning with",
        ),
        (live_scenario(more='address = "tcp://localhost:1"'), "give either env_class (a class) or address"),
        (live_scenario(more="[run.live.args]\nspeed = [1, 2]"), "args.speed: has several values"),
        (
            live_scenario().replace("[run.live]", 'reward = { type = "identity", metrics = ["y"] }\n[run.live]'),
            "a live environment gives its own reward",
        ),
        (live_scenario(more="[run.env_params.sped]"), "[run.env_params.sped]: there is no argument 'sped'"),
    ],
)
def test_g09_an_invalid_live_run_is_rejected_before_anything_starts(tmp_path, text, words):
    assert words in load_error(tmp_path, text)
    assert not (tmp_path / "out").exists()


def test_g09_live_and_batch_runs_go_through_one_dispatcher(tmp_path):
    text = batch_scenario() + live_scenario().replace('name = "test"\n', "")
    assert dispatch(load(write_scenario(tmp_path, text)), tmp_path / "out") == 0
    assert (tmp_path / "out" / "r" / "trajectory.csv").exists()
    assert (tmp_path / "out" / "p" / "trajectory.csv").exists()


@pytest.mark.parametrize("record", ["steps", "episodes"])
def test_g10_numbers_rise_across_episodes_and_files_are_in_the_runs_directory(tmp_path, record):
    text = live_scenario(more=f'record = "{record}"\n{DRAWN_SPEED}')
    assert dispatch(load(write_scenario(tmp_path, text)), tmp_path / "out") == 0
    with loopwright.Ledger.read(tmp_path / "out" / "p" / "ledger.db") as ledger:
        trials, episodes = list(ledger.trials()), list(ledger.episodes())
    assert [(one["first"], one["last"]) for one in episodes] == [(1, 5), (6, 10), (11, 15), (16, 20), (21, 23)]
    assert len({one["regime"]["speed"] for one in episodes}) == 2
    with (tmp_path / "out" / "p" / "trajectory.csv").open() as file:
        trajectory = list(csv.DictReader(file))
    with (tmp_path / "out" / "p" / "env.csv").open() as file:
        env_rows = list(csv.DictReader(file))
    numbers = list(range(1, 24)) if record == "steps" else [5, 10, 15, 20, 23]
    assert [int(row["trial"]) for row in trajectory] == [int(row["trial"]) for row in env_rows] == numbers
    assert [row.number for row in trials] == numbers
    if record == "episodes":
        assert [json.loads(row["observation"])["first"] for row in trajectory] == [1, 6, 11, 16, 21]


@pytest.mark.parametrize(
    ("env_class", "words"),
    [
        ("Server", "has no module part"),
        ("toy:Sever", "has no attribute 'Sever'"),
        ("toy:number", "is of type int"),
        ("toy:NotAServer", "it has no method step, close"),
        ("no_such_module:Server", "there is no module 'no_such_module'"),
        ("gymnasium:NoSuchEnv-v1", "gymnasium has no environment"),
    ],
)
def test_g11_a_bad_class_fails_at_load_time_with_the_reason(tmp_path, env_class, words):
    message = load_error(tmp_path, live_scenario(env_class))
    assert "[run.live] env_class" in message
    assert words in message


def test_g12_a_batch_step_ends_its_episode_and_the_budget_truncates_it(tmp_path):
    env = GymnasiumAdapter(search_env(tmp_path, {"x": [1, 2]}, lambda x: x, budget=3))
    answers = [env.step_raw({"x": 1}) for _ in range(3)]
    assert [len(answer) for answer in answers] == [5, 5, 5]
    assert [(terminated, truncated) for _, _, terminated, truncated, _ in answers] == [
        (True, False),
        (True, False),
        (True, True),
    ]
    env.close()


def test_g12_a_live_episode_ends_when_the_server_ends_it(tmp_path):
    env = LiveAdapter(live_env(tmp_path))
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

    def encode_observation(self, metrics, regime):
        return {}
