"""Servers in separate processes: `loopwright serve-env`, one that is killed, and one in another language."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from loopwright.core.errors import InvalidAction
from loopwright.envs.live.remote import RemoteServer
from loopwright.envs.live.server import ServerLost

NODE_SERVER = Path(__file__).with_name("node_server.js")
SIMULATOR = """
import time
from pathlib import Path
import gymnasium, numpy as np

class Slow(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, marker="", level=0):
        self.marker, self.level = marker, level

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {"level": self.level}

    def step(self, action):
        if action:
            Path(self.marker).touch()
            time.sleep(60)
        return np.zeros(1, np.float32), 0.0, False, False, {}
"""


@contextmanager
def running(command, cwd):
    """A process, and the first line that it prints."""
    with subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def serve_env(*words):
    return [sys.executable, "-m", "loopwright", "serve-env", *words]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_serve_env_serves_any_gymnasium_environment_until_a_signal(tmp_path, number, code):
    path = tmp_path / "cartpole.sock"
    command = serve_env("gymnasium:CartPole-v1", "--address", f"unix://{path}", "--arg", "max_episode_steps=2")
    with running(command, tmp_path) as (process, line):
        assert line == f"serving gymnasium:CartPole-v1 at unix://{path}"
        server = RemoteServer(f"unix://{path}")
        server.reset(seed=1)
        assert [server.step(0)[3] for _ in range(2)] == [False, True]
        process.send_signal(number)
        assert process.wait(30) == code
        assert process.stderr.read() == ""
        server.close()
    assert not path.exists()


def test_serve_env_passes_json_and_text_and_finds_modules_here(tmp_path):
    (tmp_path / "simulator.py").write_text(SIMULATOR)
    words = ("simulator:Slow", "--address", "tcp://127.0.0.1:0", "--arg", "level=[1, 2]", "--arg", "marker=a=b")
    with running(serve_env(*words), tmp_path) as (_, line):
        server = RemoteServer(line.split()[-1])
        assert server.reset()[1] == {"level": [1, 2]}
        server.close()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("simulator:Slow", "--address", "unix:///tmp/s"), "error: 'simulator:Slow': there is no module 'simulator'"),
        (("gymnasium:CartPole-v1", "--address", "nowhere"), "error: 'nowhere' is not an address. Write"),
        (("gymnasium:CartPole-v1", "--address", "tcp://0.0.0.0:0"), "--public"),
        (
            ("gymnasium:CartPole-v1", "--address", "tcp://127.0.0.1:0", "--arg", "x=1"),
            "cannot make 'CartPole-v1' with the arguments x",
        ),
    ],
)
def test_serve_env_rejects_invalid_arguments(tmp_path, words, complaint):
    completed = subprocess.run(serve_env(*words), cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert completed.returncode == 1
    assert complaint in completed.stderr
    assert "Traceback" not in completed.stderr


def test_a_server_killed_during_a_step_is_lost_and_reconnected(tmp_path):
    (tmp_path / "simulator.py").write_text(SIMULATOR)
    marker, address = tmp_path / "marker", f"unix://{tmp_path}/s"
    command = serve_env("simulator:Slow", "--address", address, "--arg", f"marker={marker}")
    with running(command, tmp_path) as (process, _):
        server = RemoteServer(address)
        server.reset()

        def kill():
            while not marker.exists():
                threading.Event().wait(0.01)
            os.kill(process.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(ServerLost, match="the connection broke during 'step'"):
            server.step(1)
        killer.join()
    with running(command, tmp_path):
        server.reset()
        assert server.step(0)[1] == 0.0
        server.close()


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_server_in_another_language_is_stepped(tmp_path, kind):
    expected = f"unix://{tmp_path}/s" if kind == "unix" else "tcp://127.0.0.1:0"
    with running(["node", str(NODE_SERVER), expected], tmp_path) as (_, address):
        server = RemoteServer(address, validate=True)
        low, high = np.array([-10, 0], np.float32), np.array([10, 10], np.float32)
        assert server.observation_space == spaces.Box(low, high, (2,), np.float32)
        assert server.action_space == spaces.Discrete(3)
        server.ping()
        observation, info = server.reset(seed=2**40, options={"start": -300, "unused": ["ä" * 40, None, 1.5, -200]})
        assert (observation.tolist(), observation.dtype, info) == ([-300, 10], np.float32, {"seed": 2**40})
        server.reset()
        steps = [server.step(action) for action in (2, 1, 2, 2)]
        assert [step[0].tolist() for step in steps] == [[1, 9], [1, 8], [2, 7], [3, 6]]
        assert [step[1:] for step in steps[-2:]] == [
            (-0.1, False, False, {"where": "Malmö"}),
            (1.0, True, False, {"where": "Malmö"}),
        ]
        with pytest.raises(InvalidAction, match="7 is not one of 0, 1, 2"):
            server.step(7)
        server.reset()
        assert [server.step(1)[3] for _ in range(10)] == [False] * 9 + [True]
        other = RemoteServer(address)
        assert other.reset()[0].tolist() == [0, 10]
        other.close()
        server.close()
