"""S18 for live runs, and environments that crash, hang, break their promises or go away."""

import threading
from contextlib import ExitStack

import pytest

from loopwright.core.outcome import Outcome
from loopwright.ledger.ledger import Ledger
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.load import load
from tests.contracts.gymnasium_harness import live_scenario, load_error, write_scenario
from tests.contracts.harness import trials
from tests.envs.helpers import LineServer
from tests.envs.live.peers import serving

FAULTY = """
import ctypes, math, os, time
import numpy as np
from gymnasium import spaces
from tests.envs.helpers import LineServer

class Old(LineServer):
    def step(self, action):
        return super().step(action)[:4]

class Nan(LineServer):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, math.nan if self.steps % 9 in (3, 7) else reward, *rest

class Other(LineServer):
    def reset(self, **options):
        super().reset(**options)
        return np.zeros(7, np.float32), {}

class Segfault(LineServer):
    def step(self, action):
        if self.steps == 8:
            ctypes.string_at(0)
        return super().step(action)

class Hangs(LineServer):
    def step(self, action):
        if self.steps == 8:
            ctypes.PyDLL(None).sleep(600)
        return super().step(action)
"""


@pytest.fixture
def faulty(tmp_path):
    name = f"faulty_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(FAULTY)
    return name


def run(directory, env_class, budget=60, more="", isolate="false", agent="random", **options):
    agent = f'agent = {{ type = "{agent}", trials = {budget} }}'
    text = live_scenario(env_class, more, agent).replace("isolate = false", f"isolate = {isolate}")
    return dispatch(load(write_scenario(directory, text)), directory / "out", **options)


def failure(directory):
    with Ledger.read(directory / "out" / "p" / "ledger.db") as ledger:
        return ledger.state("failure")


@pytest.mark.parametrize("agent", ["random", "a2c"])
@pytest.mark.parametrize("record", ["steps", "episodes"])
def test_s18_an_environment_whose_steps_all_fail_stops_early_with_the_grouped_reason(tmp_path, faulty, agent, record):
    assert run(tmp_path, f"{faulty}:Old", 300, f'record = "{record}"', agent=agent) == 1
    assert len(trials(tmp_path, "p")) == 10
    reason = "10 steps in a row failed, so the run was stopped: 10 × metric_missing: 'step' returned 4 values, expected"
    assert failure(tmp_path).startswith(reason)
    assert "10 steps in a row failed" in (tmp_path / "out/report.html").read_text()


def test_s18_a_run_in_which_most_episodes_fail_is_not_a_success(tmp_path, faulty):
    assert run(tmp_path, f"{faulty}:Nan") == 1
    assert len(trials(tmp_path, "p")) == 60, "it may still learn to avoid them"
    assert "episodes ended with a failed step: " in failure(tmp_path)
    assert "metric_missing: reward: expected a finite number, got nan" in failure(tmp_path)


def test_s18_other_spaces_after_a_reset_end_the_run_with_the_reason(tmp_path, faulty):
    assert run(tmp_path, f"{faulty}:Other") == 1
    assert "obs: expected shape (2,), got (7,)" in failure(tmp_path)


@pytest.mark.parametrize(("kind", "outcome"), [("Segfault", Outcome.CRASHED), ("Hangs", Outcome.TIMEOUT)])
def test_s18_a_fatal_fault_costs_the_episode_and_not_the_run(tmp_path, faulty, kind, outcome):
    assert run(tmp_path, f"{faulty}:{kind}", 12, "timeout_s = 3.0", isolate="true") == 0
    rows = trials(tmp_path, "p")
    assert [row.number for row in rows] == list(range(1, 13))
    assert [row.number for row in rows if row.outcome is outcome] == [9]
    assert all(row.outcome is Outcome.OK for row in rows if row.number != 9)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ('gamma = "high"', "options.gamma: must be a number, not 'high'; the default is 0.99."),
        ("normalize_advantage = 1", "options.normalize_advantage: must be true or false, not 1; the default is true."),
        ('device = "gpu"', "options.device: 'gpu' is not a device; write 'cpu', 'cuda' or 'cuda:1'."),
        ('device = "cuda:99"', "options.device: there is no device 'cuda:99'"),
    ],
)
def test_s18_options_that_cannot_work_are_refused_at_load_time(tmp_path, option, words):
    agent = f'agent = {{ type = "ppo", trials = 50, options = {{ {option} }} }}'
    assert words in load_error(tmp_path, live_scenario(agent=agent))


def test_a_socket_server_that_dies_and_returns_costs_the_episode(tmp_path):
    address, dies = f"unix://{tmp_path}/s", threading.Event()

    class Dies(LineServer):
        def step(self, action):
            if self.steps == 7:
                dies.set()
                threading.Event().wait()  # until its server is gone
            return super().step(action)

    def replace(servers):
        dies.wait()
        servers.close()
        servers.enter_context(serving(LineServer, address))

    with ExitStack() as servers:
        servers.enter_context(serving(Dies, address))
        thread = threading.Thread(target=replace, args=(servers,))
        thread.start()
        text = live_scenario(agent='agent = { type = "random", trials = 30 }')
        text = text.replace('env_class = "toy:Server"\nisolate = false', f'address = "{address}"')
        assert dispatch(load(write_scenario(tmp_path, text)), tmp_path / "out") == 0
        thread.join()
    rows = trials(tmp_path, "p")
    assert len(rows) == 30
    assert [row.outcome for row in rows if row.outcome is not Outcome.OK] == [Outcome.LOST]
