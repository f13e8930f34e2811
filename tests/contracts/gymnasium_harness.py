"""Scenarios, servers and checks that the Gymnasium and live contract tests share."""

import sys
import warnings

import pytest
from gymnasium.utils.env_checker import check_env

from loopwright.core.errors import ScenarioError
from loopwright.scenario.load import load
from tests.envs.helpers import search_env

IGNORED_WARNINGS = (
    "A Box observation space (min|max)imum value is -?infinity",  # the bounds of a metric are unknown
    "For Box action spaces, we recommend",  # the dict view has the native bounds; only the flat one is normalised
    "Your action space has dtype float64",  # float32 cannot represent every integer of a wide range
)


def check(env, checker=check_env, **options):
    """Run a checker. Warnings are errors, except for those that do not apply to a run with metrics."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for message in IGNORED_WARNINGS:
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


def study_env(directory):
    """A search environment with every kind of parameter, three of them drawn."""
    return search_env(directory, ARGUMENTS, score, env_params=DRAWN)


SPEEDS = {"speed": [1, 2.5, 30], "wind": ["calm", "storm"]}


WORK = """
def score(x, wind=0):
    return {"y": float(x)}
"""


TOY = """
from gymnasium import spaces
from tests.envs.helpers import LineServer

class Server(LineServer):
    made = []

    def __init__(self, speed=1.0, color="red"):
        super().__init__()
        Server.made.append((speed, color))

class DeclaresContext(LineServer):
    observation_space = spaces.Dict({"context": spaces.Discrete(2)})

class SetsContextLater(LineServer):
    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Dict({"context": spaces.Discrete(2)})

class NotAServer:
    def reset(self): ...

number = 5
"""


def batch_scenario(agent='{ type = "random", trials = 4 }', args="x = [1, 2]", more="", name="r"):
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


def live_scenario(
    env_class="toy:Server", more="", agent='agent = { type = "ppo", trials = 23, rollout = 8 }', name="p"
):
    return f"""
name = "test"
[[run]]
name = "{name}"
{agent}
[run.live]
env_class = "{env_class}"
isolate = false
{more}
"""


def write_scenario(directory, text):
    sys.modules.pop("toy", None)  # of an earlier test
    (directory / "toy.py").write_text(TOY)
    (directory / "toy_work.py").write_text(WORK)
    (directory / "scenario.toml").write_text(text)
    return directory / "scenario.toml"


def load_error(directory, text):
    with pytest.raises(ScenarioError) as raised:
        load(write_scenario(directory, text))
    return str(raised.value)


DRAWN_SPEED = "[run.live.args]\nspeed = [1.0, 2.0]\ncolor = 'blue'\nunused = 7\n[run.env_params.speed]"
