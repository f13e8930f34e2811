"""Scenarios of small trainings, and what tests read from their ledgers."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import stable_baselines3
from tests.envs.helpers import wait_until

from loopwright.core.errors import ScenarioError
from loopwright.ledger.ledger import Ledger
from loopwright.scenario.dispatch import dispatch, reopen
from loopwright.scenario.load import load

TOY = """
import time

def score(x, mode="good", wind=0, wait_s=0.0):
    time.sleep(wait_s)
    if mode == "bad":
        raise RuntimeError("bad mode")
    return {"y": -abs(x - (3 if wind else 1))}
"""

LISTS = "x = [0, 1, 2, 3]\nwind = [0, 1]"
RANGE = "x = { low = 0.0, high = 3.0 }\nwind = [0, 1]"
DRAWN = "[run.env_params.wind]"


def batch_scenario(
    agent: str, args: str = LISTS, more: str = DRAWN, *, run: str = "", parallel: int = 1, name: str = "r"
) -> str:
    return f"""
name = "training"
[system]
parallel = {parallel}
[[run]]
name = "{name}"
agent = {{ {agent} }}
reward = {{ type = "identity", metrics = ["y"] }}
{run}
[run.workload]
type = "python"
function = "rl_toy:score"
metrics = ["y"]
[run.workload.args]
{args}
{more}
"""


def live_scenario(
    agent: str, env_class: str = "gymnasium:CartPole-v1", more: str = "", *, isolate: bool = False
) -> str:
    return f"""
name = "training"
[[run]]
name = "r"
agent = {{ {agent} }}
reward = {{ type = "server" }}
[run.live]
env_class = "{env_class}"
isolate = {str(isolate).lower()}
{more}
"""


def write_scenario(directory: Path, text: str) -> Path:
    (directory / "rl_toy.py").write_text(TOY)
    (directory / "scenario.toml").write_text(text)
    return directory / "scenario.toml"


def load_error(directory: Path, text: str) -> str:
    with pytest.raises(ScenarioError) as raised:
        load(write_scenario(directory, text))
    return str(raised.value)


def train(directory: Path, text: str) -> int:
    return dispatch(load(write_scenario(directory, text)), directory / "out")


def resume(directory: Path) -> int:
    return dispatch(reopen(directory / "out"), directory / "out", resume=True)


def train_and_interrupt(directory: Path, text: str, count: int) -> int:
    """The exit code of a training that gets a SIGINT after `count` trials."""
    path = directory / "out" / "r" / "ledger.db"

    def enough_trials() -> bool:
        if not path.exists():
            return False
        with Ledger.read(path) as ledger:
            return ledger.last()[0] > count

    def interrupt() -> None:
        wait_until(enough_trials)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    code = train(directory, text)
    thread.join()
    return code


def rows(directory: Path, run: str = "r") -> list[Any]:
    with Ledger.read(directory / "out" / run / "ledger.db") as ledger:
        return list(ledger.trials())


def numbers(directory: Path, run: str = "r") -> list[int]:
    return [row.number for row in rows(directory, run)]


def state(directory: Path, name: str) -> Any:
    with Ledger.read(directory / "out" / "r" / "ledger.db") as ledger:
        return ledger.state(name)


def saved_model(directory: Path, algorithm: str = "PPO") -> Any:
    return getattr(stable_baselines3, algorithm).load(directory / "out" / "r" / "policy" / "policy.zip")


def timesteps(directory: Path, algorithm: str = "PPO") -> int:
    return int(saved_model(directory, algorithm).num_timesteps)


def updates(directory: Path, algorithm: str = "PPO") -> int:
    return int(saved_model(directory, algorithm)._n_updates)
