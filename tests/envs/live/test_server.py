"""Finding a server: objects, classes and factories by path, gymnasium's registry, and errors."""

import re
import subprocess
import sys

import gymnasium
import pytest
from tests.envs.live.peers import Walker

from loopwright.core.errors import LoopwrightError
from loopwright.envs.live.server import ServerError, ServerLost, check_server_class, make_server

MODULE = """
import tests.envs.live.peers as peers

class Walker(peers.Walker):
    def __init__(self, start=0.0):
        super().__init__(start)

class Greedy(peers.Walker):
    def __init__(self, **options):
        super().__init__()
        self.options = options

def make(start, unused=5):
    return Walker(start)

class Halt:
    def reset(self): ...

class Box:
    Inner = Walker

number = 5
"""


@pytest.fixture
def scenario_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "live_home.py").write_text(MODULE)
    (tmp_path / "live_broken.py").write_text("1 / 0")
    (tmp_path / "live_needy.py").write_text("import not_there_at_all")
    yield tmp_path
    for name in ("live_home", "live_broken", "live_needy"):
        sys.modules.pop(name, None)


def test_g08_an_object_is_used_unchanged(scenario_dir):
    walker = Walker()
    assert make_server(walker, {"start": 3}, scenario_dir) is walker
    env = gymnasium.make("CartPole-v1")
    assert make_server(env, {}, scenario_dir) is env
    env.close()


@pytest.mark.parametrize("path", ["live_home:Walker", "live_home.Walker", "live_home:make", "live_home:Box.Inner"])
def test_g08_a_class_or_factory_gets_the_arguments_that_it_accepts(scenario_dir, path):
    assert check_server_class(path, scenario_dir) is None
    assert make_server(path, {"start": 2.0, "colour": "red"}, scenario_dir).start == 2.0


def test_g08_a_factory_with_kwargs_gets_all_arguments(scenario_dir):
    assert make_server("live_home:Greedy", {"start": 2.0, "colour": "red"}, scenario_dir).options == {
        "start": 2.0,
        "colour": "red",
    }


def test_g08_a_class_object_is_instantiated(scenario_dir):
    assert make_server(Walker, {"start": 4.0}, scenario_dir).start == 4.0


def test_g08_a_registered_environment_is_made_by_gymnasium(scenario_dir):
    assert check_server_class("gymnasium:CartPole-v1", scenario_dir) is None
    server = make_server("gymnasium:CartPole-v1", {"max_episode_steps": 3}, scenario_dir)
    assert server.spec.max_episode_steps == 3
    server.close()
    with pytest.raises(ServerError, match="nonsense"):
        make_server("gymnasium:CartPole-v1", {"nonsense": 3}, scenario_dir)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("Walker", "'Walker' has no module part. Write 'module:Class'"),
        (":Walker", "no module part"),
        ("live_home:", "no module part"),
        ("live_home:Wolker", "no attribute 'Wolker'. Known: .* Did you mean 'Walker'?"),
        ("live_absent:Walker", "there is no module 'live_absent'"),
        ("live_home.deep:Walker", "live_home.deep"),
        ("live_broken:Walker", "importing 'live_broken' failed: ZeroDivisionError"),
        ("live_needy:Walker", "importing 'live_needy' failed: ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("live_home:number", "is of type int"),
        ("live_home:Halt", "it has no method step, close"),
        ("gymnasium:KartPole-v1", "gymnasium has no environment 'KartPole-v1'"),
    ],
)
def test_g11_a_bad_class_fails_with_the_reason(scenario_dir, path, words):
    reason = check_server_class(path, scenario_dir)
    assert reason is not None
    assert re.search(words, reason), reason


def test_g11_the_created_object_must_be_a_server(scenario_dir):
    with pytest.raises(ServerError, match="'dict' is not a GymServer: it has no observation_space, action_space"):
        make_server({}, {}, scenario_dir)


def test_g07_without_the_extra_the_error_says_what_to_install(scenario_dir):
    code = """
import sys
sys.modules["gymnasium"] = sys.modules["msgpack"] = None
from pathlib import Path
import loopwright
from loopwright.envs.live.server import check_server_class
print(check_server_class("gymnasium:CartPole-v1", Path()))
try:
    import loopwright.envs.live.remote
except ImportError as error:
    print(type(error).__name__, error)
"""
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert output == [
        "a gymnasium environment needs an extra that is not installed. Run: pip install 'loopwright[rl]'",
        "MissingExtra an environment behind a socket needs an extra that is not installed. "
        "Run: pip install 'loopwright[rl]'",
    ]


def test_the_errors_extend_standard_exceptions():
    assert issubclass(ServerLost, LoopwrightError)
    assert issubclass(ServerLost, ConnectionError)
    assert issubclass(ServerError, LoopwrightError)
    assert issubclass(ServerError, ValueError)
