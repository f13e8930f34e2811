"""Isolated environments: several copies in one child process, and whatever they do to it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from tests.envs.helpers import wait_until

from loopwright.core.outcome import Outcome
from loopwright.envs.live import isolated
from loopwright.envs.live.isolated import EnvProcess, Failure, IsolatedServer, ResetRequest, StepRequest
from loopwright.envs.live.regime_server import ServerTarget
from loopwright.envs.live.server import ServerError, ServerLost

SERVERS = """
import ctypes
import os

import numpy as np
from gymnasium import spaces

class Counts:
    action_space = spaces.Discrete(3)

    def __init__(self, size=1, word=""):
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.size, self.word, self.count = size, word, 0

    def reset(self, *, seed=None, options=None):
        if self.word == "no reset":
            raise RuntimeError("no reset")
        self.count = 0
        return self.observe(), {"pid": os.getpid(), "seed": seed, "word": self.word}

    def step(self, action):
        if action == 2:
            getattr(self, self.word)()
        self.count += 1
        return self.observe(), float(action), self.count == 5, False, {} if action else {"f": lambda: 1}

    def observe(self):
        return np.full(self.size, self.count, np.float32)

    def segfault(self): ctypes.string_at(0)
    def leave(self): os._exit(3)
    def hang(self): ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock
    def raises(self): raise RuntimeError("boom")
    def leaves_politely(self): raise SystemExit(0)
    def close(self): ...
"""


@pytest.fixture
def target(tmp_path, monkeypatch):
    (tmp_path / f"isolated_{tmp_path.name}.py").write_text(SERVERS)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda drawn=None, **args: ServerTarget(f"isolated_{tmp_path.name}:Counts", args, drawn or {}, tmp_path)


def test_copies_are_stepped_together_in_the_order_of_the_requests(target):
    process = EnvProcess(target(), copies=3, timeout_s=30.0)
    first = process.call([ResetRequest(n, seed=n) for n in range(3)])
    assert [info["seed"] for _, info in first] == [0, 1, 2]
    assert {info["pid"] for _, info in first} != {os.getpid()}
    assert len({info["pid"] for _, info in first}) == 1, "one process for all"
    stepped = process.call([StepRequest(2, 1), StepRequest(0, 0), StepRequest(2, 1), ResetRequest(1)])
    assert [response[0].tolist() for response in stepped] == [[1.0], [1.0], [2.0], [0.0]]
    assert isinstance(stepped[1][-1]["f"], str), "what cannot be sent is its repr"
    process.close()
    process.close()


def test_a_copy_that_raises_costs_its_own_episode(target):
    process = EnvProcess(target(word="raises"), copies=2, timeout_s=30.0)
    process.call([ResetRequest(0), ResetRequest(1)])
    failure, other = process.call([StepRequest(0, 2), StepRequest(1, 1)])
    assert failure == Failure("RuntimeError: boom")
    assert other[0].tolist() == [1.0]
    assert [response[0].tolist() for response in process.call([ResetRequest(0), StepRequest(1, 1)])] == [[0.0], [2.0]]
    assert process.starts == 1
    process.close()


@pytest.mark.parametrize(
    ("word", "outcome", "reason"),
    [
        ("segfault", Outcome.CRASHED, "was killed by SIGSEGV"),
        ("leave", Outcome.CRASHED, "exited with code 3"),
        ("hang", Outcome.TIMEOUT, "did not respond to 'step' within 5 s"),
        ("raises", Outcome.CRASHED, "RuntimeError: boom"),
        ("leaves_politely", Outcome.CRASHED, "SystemExit: 0"),
    ],
)
def test_whatever_happens_in_a_step_the_next_reset_works(target, word, outcome, reason, monkeypatch):
    server = IsolatedServer(target(word=word), timeout_s=5.0)
    server.reset()
    if word == "hang":
        server._process._channel.set_timeout(0.2)
    with pytest.raises(ServerLost, match=reason) as raised:
        server.step(2)
    assert (raised.value.outcome, raised.value.restarts) == (outcome, True)
    assert server.reset(seed=4)[1]["seed"] == 4
    assert server.step(1)[1] == 1.0
    server.close()


def test_a_reset_that_keeps_failing_is_reported_after_three_attempts(target):
    server = IsolatedServer(target(word="no reset"), timeout_s=30.0)
    with pytest.raises(ServerLost, match="RuntimeError: no reset"):
        server.reset()
    server.close()


def test_an_environment_that_cannot_be_created_is_an_error(target):
    with pytest.raises(ServerError, match="cannot create"):
        IsolatedServer(target(size="wide"))


def test_a_drawn_argument_of_the_constructor_takes_effect_unless_it_changes_the_spaces(target):
    server = IsolatedServer(target({"word": "a", "size": 1}), timeout_s=30.0)
    for word in ("a", "b", "b", "a"):
        _, info = server.reset(options={"env_params": {"word": word}})
        assert info["word"] == word
        assert info["env_params"] == {"word": word}
    assert server.observation_space == spaces.Box(-np.inf, np.inf, (1,), np.float32)
    with pytest.raises(ServerError, match="'size': 2} the observation_space is Box"):
        server.reset(options={"env_params": {"size": 2}})
    server.close()


PARENT = """
import sys
from pathlib import Path
from loopwright.envs.live.isolated import IsolatedServer, ServerTarget
server = IsolatedServer(ServerTarget(sys.argv[1], {"word": "hang"}, {}, Path(sys.argv[2])))
print(server.reset()[1]["pid"], flush=True)
server.step(2)
"""


def test_the_process_ends_with_its_parent_even_if_native_code_hangs(target):
    server = target()
    command = [sys.executable, "-c", PARENT, server.path, str(server.directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_that_never_answers_is_not_waited_for(target, monkeypatch):
    monkeypatch.setattr(isolated, "_START_TIMEOUT_S", 0.01)
    with pytest.raises(ServerLost, match="was not created within"):
        IsolatedServer(target())
