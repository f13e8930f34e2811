"""Probing: a server's spaces before a run starts, and what is wrong with an address or its arguments."""

import os
from pathlib import Path

import pytest
from gymnasium import spaces

from loopwright.envs.live import config, isolated
from loopwright.envs.live.config import LiveConfig, probe_spaces
from loopwright.envs.live.regime_server import ServerTarget

SERVERS = """
import os
import sys
import time
from pathlib import Path

from gymnasium import Env, spaces

HERE = Path(__file__).parent

class Shows(Env):
    observation_space, action_space = spaces.Discrete(2), spaces.Discrete(3)

    def __init__(self):
        raise RuntimeError("it is not made")

class Sets(Env):
    def __init__(self, n=4):
        print("a word of its own")
        self.observation_space, self.action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(n)
        with (HERE / "made").open("a") as file:
            file.write(f"{os.getpid()}\\n")

    def close(self):
        (HERE / "closed").touch()

class Replaces(Shows):
    def __init__(self):
        self.action_space = spaces.Discrete(9)

class Raises(Sets):
    def __init__(self):
        raise RuntimeError("no device")

class Exits(Sets):
    def __init__(self):
        sys.exit("no licence")

class Dies(Sets):
    def __init__(self):
        os._exit(9)

class Sleeps(Sets):
    def __init__(self):
        time.sleep(600)

def factory(n):
    return Sets(n)

class Nothing:
    def reset(self): ...
    def step(self): ...
    def close(self): ...
"""


@pytest.fixture
def directory(tmp_path, monkeypatch):
    # A new name for each test: modules are imported once per process.
    (tmp_path / f"probed_{tmp_path.name}.py").write_text(SERVERS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def probe_server(directory: Path, name: str, **args):
    return probe_spaces(ServerTarget(f"probed_{directory.name}:{name}", args, directory=directory))


def test_declared_spaces_are_read_without_creating_the_server(directory):
    assert probe_server(directory, "Shows").action_space == spaces.Discrete(3)


def test_a_server_is_created_once_in_another_process_and_closed(directory):
    for _ in range(2):
        spaces_ = probe_server(directory, "Sets", n=5)
    assert (spaces_.observation_space, spaces_.action_space) == (spaces.Box(-1, 1, (2,)), spaces.Discrete(5))
    assert len(lines := (directory / "made").read_text().split()) == 1
    assert int(lines[0]) != os.getpid()
    assert (directory / "closed").exists()


def test_a_constructor_may_replace_the_declared_spaces(directory):
    assert probe_server(directory, "Replaces").action_space == spaces.Discrete(9)


def test_a_factory_is_called(directory):
    assert probe_server(directory, "factory", n=6).action_space == spaces.Discrete(6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", ": RuntimeError: no device"),
        ("Exits", ": SystemExit: no licence"),
        ("Dies", "failed: its process exited with code 9 while it was created"),
        ("factory", ": TypeError: factory() missing 1 required positional argument: 'n'"),
        ("Nothing", "is not a GymServer: it has no observation_space, action_space"),
    ],
)
def test_a_server_that_cannot_be_created_is_a_problem(directory, name, message):
    assert message in probe_server(directory, name).problem
    problems = LiveConfig(env_class=f"probed_{directory.name}:{name}").problems(directory, ())
    assert [one.key for one in problems] == ["env_class"]
    assert problems[0].message.count("probed_") == 1


def test_a_probe_without_a_response_leaves_the_spaces_unknown(directory, monkeypatch):
    monkeypatch.setattr(isolated, "_START_TIMEOUT_S", 3.0)
    assert probe_server(directory, "Sleeps") == config.ServerSpaces()


REGISTERED = """
gymnasium.register("{name}/Raises-v0", entry_point=lambda **args: Raises())
gymnasium.register("{name}/Dies-v0", entry_point=lambda **args: Dies())
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [("Raises", "RuntimeError: no device"), ("Dies", "exited with code 9 while it was created")],
)
def test_a_registered_environment_that_cannot_be_created_is_a_problem_and_harms_nobody(directory, name, message):
    module = f"probed_{directory.name}"
    text = SERVERS.replace("import os\n", "import os\n\nimport gymnasium\n", 1) + REGISTERED.format(name=module)
    (directory / f"{module}.py").write_text(text)
    problems = LiveConfig(env_class=f"gymnasium:{module}:{module}/{name}-v0").problems(directory, ())
    assert [one.key for one in problems] == ["env_class"]
    assert message in problems[0].message
    assert not (directory / "made").exists()


def test_an_environment_of_another_package_is_refused_with_the_way_to_name_it(tmp_path):
    (problem,) = LiveConfig(env_class="gymnasium:Nowhere/Pong-v5").problems(tmp_path, ())
    assert "name that too: 'gymnasium:package:Nowhere/Pong-v5'" in problem.message


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("tcp://localhost", "'tcp://localhost' is not an address"),
        ("tcp://host:99999", "Port out of range"),
        ("tcp://host:0", "port 0"),
        ("unix://rel.sock", "'unix://rel.sock' is not an address"),
        ("http://host:80", "is not an address"),
    ],
)
def test_an_impossible_address_is_a_problem(tmp_path, address, message):
    (problem,) = LiveConfig(address=address).problems(tmp_path, ())
    assert problem.key == "address"
    assert message in problem.message


@pytest.mark.parametrize("address", ["tcp://localhost:7000", "tcp://[::1]:7000", "unix:///run/sim.sock"])
def test_a_usable_address_gives_no_problem(tmp_path, address):
    assert LiveConfig(address=address, args={"speed": [1, 2]}).problems(tmp_path, ["speed"]) == []


def test_a_fixed_argument_of_a_remote_server_is_a_problem(tmp_path):
    config = LiveConfig(address="tcp://localhost:7000", args={"n": 3, "speed": [1, 2]})
    (problem,) = config.problems(tmp_path, ["speed"])
    assert problem.key == "args.n"
    assert "serve-env --arg n=…" in problem.message
