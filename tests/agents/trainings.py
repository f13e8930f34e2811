"""Scenarios for RL agents over a tiny Python workload."""

from pathlib import Path
from typing import Any

from loopwright.ledger.ledger import Ledger
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.load import load
from loopwright.scenario.output import reopen

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


def batch(
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


def live(agent: str, env_class: str = "gymnasium:CartPole-v1", more: str = "") -> str:
    return f"""
name = "training"
[[run]]
name = "r"
agent = {{ {agent} }}
reward = {{ type = "server" }}
[run.live]
env_class = "{env_class}"
{more}
"""


def written(home: Path, text: str) -> Path:
    (home / "rl_toy.py").write_text(TOY)
    (home / "scenario.toml").write_text(text)
    return home / "scenario.toml"


def trained(home: Path, text: str) -> int:
    return dispatch(load(written(home, text)), home / "out")


def resumed(home: Path) -> int:
    return dispatch(reopen(home / "out"), home / "out", resume=True)


def rows(home: Path, run: str = "r") -> list[Any]:
    with Ledger.read(home / "out" / run / "ledger.db") as ledger:
        return list(ledger.trials())


def state(home: Path, name: str) -> Any:
    with Ledger.read(home / "out" / "r" / "ledger.db") as ledger:
        return ledger.state(name)


def timesteps(home: Path, algorithm: str = "PPO") -> int:
    import stable_baselines3

    return int(getattr(stable_baselines3, algorithm).load(home / "out" / "r" / "policy" / "policy.zip").num_timesteps)
