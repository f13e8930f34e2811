"""Live environments: CartPole through `loopwright.make` against the bare environment, and what a step leaves behind.

Both get the same actions and reset where an episode ends; ours has each step numbered, checked and recorded. With
`isolate`, the environment is in a process of its own: measured against SB3's `SubprocVecEnv`, which does the same.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from stable_baselines3.common.vec_env import SubprocVecEnv

import loopwright
from benchmarks.measure import Ratio, best_of
from benchmarks.spine import MEMORY
from loopwright.envs.live.isolated import EnvProcess, Reset, Step
from loopwright.envs.live.regime_server import ServerTarget
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.recorder import Recorder

ENVIRONMENT = "CartPole-v1"
STEPS, ROUNDS = 20_000, 9
ISOLATED_STEPS, ISOLATED_ROUNDS, COPIES = 4_000, 5, 8
TRIALS, BATCHES = 100_000, 5
MANY, MOST_MB = 1_000_000, 300
SCENARIO = """
name = "live"
[[run]]
name = "{record}"
agent = {{ type = "ppo", trials = 1 }}
reward = {{ type = "server" }}
[run.live]
env_class = "{env_class}"
record = "{record}"
isolate = {isolate}
"""


def make_env(home: Path, env_class: str, record: str, *, isolate: bool = False) -> Any:
    """A live run as an environment, with its record in `home`."""
    file = home / f"{record}-{isolate}.toml"
    file.write_text(SCENARIO.format(env_class=env_class, record=record, isolate=str(isolate).lower()))
    return loopwright.make(file, output=home / f"out-{record}-{isolate}")


def walk(env: Any, steps: int = STEPS) -> Callable[[], None]:
    """So many steps, with a reset where an episode ends; the same actions for everybody.

    What a round has to write is written within it: left to the recorder's thread, it would slow down the next round.
    """
    flush: Callable[[], None] = env.inner.flush if hasattr(env, "inner") else lambda: None

    def walked() -> None:
        env.reset(seed=1)
        for number in range(steps):
            _, _, terminated, truncated, _ = env.step(number & 1)
            if terminated or truncated:
                env.reset()
        flush()

    return walked


def stepping() -> list[Ratio]:
    """Steps per second through Loopwright and without it."""
    memory = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        envs = {
            record: make_env(Path(directory), f"gymnasium:{ENVIRONMENT}", record) for record in ("steps", "episodes")
        }
        envs["bare"] = gymnasium.make(ENVIRONMENT)
        best = best_of(ROUNDS, {name: walk(env) for name, env in envs.items()})
        for env in envs.values():
            env.close()
    rate = {name: STEPS / taken_s for name, taken_s in best.items()}
    return [
        Ratio(
            f"live: {ENVIRONMENT} with {what} recorded, against the bare environment",
            rate[name] / rate["bare"],
            target,
            at_least=True,
            detail=f"{rate[name]:,.0f} steps/s, bare {rate['bare']:,.0f}",
        )
        for name, what, target in (("steps", "every step", 0.4), ("episodes", "whole episodes", 0.5))
    ]


def isolated() -> list[Ratio]:
    """Steps per second of one environment and of eight in a process of their own, against SB3's `SubprocVecEnv`."""
    actions = [np.full(COPIES, number & 1) for number in range(2)]
    target = ServerTarget(f"gymnasium:{ENVIRONMENT}")
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as directory:
        one = make_env(Path(directory), f"gymnasium:{ENVIRONMENT}", "steps", isolate=True)
        process = EnvProcess(target, copies=COPIES)
        theirs = {copies: SubprocVecEnv([lambda: gymnasium.make(ENVIRONMENT)] * copies) for copies in (1, COPIES)}

        def step_process() -> None:
            process.call([Reset(n) for n in range(COPIES)])
            for number in range(ISOLATED_STEPS // COPIES):
                responses = process.call([Step(n, action) for n, action in enumerate(actions[number & 1])])
                if ended := [Reset(n) for n, response in enumerate(responses) if response[2] or response[3]]:
                    process.call(ended)

        def step_theirs(copies: int) -> Callable[[], None]:
            def stepped() -> None:
                theirs[copies].reset()
                for number in range(ISOLATED_STEPS // copies):
                    theirs[copies].step(actions[number & 1][:copies])

            return stepped

        contenders = {
            "one": walk(one, ISOLATED_STEPS),
            "eight": step_process,
            "their one": step_theirs(1),
            "their eight": step_theirs(COPIES),
        }
        best = best_of(ISOLATED_ROUNDS, contenders)
        for env in (one, process, *theirs.values()):
            env.close()
    rate = {name: ISOLATED_STEPS / taken_s for name, taken_s in best.items()}
    return [
        Ratio(
            f"live: {what} with isolate, against SubprocVecEnv",
            rate[name] / rate[f"their {name}"],
            goal,
            at_least=True,
            detail=f"{rate[name]:,.0f} steps/s, SubprocVecEnv {rate[f'their {name}']:,.0f}",
        )
        for name, what, goal in (
            ("one", f"{ENVIRONMENT} with every step recorded", 0.5),
            ("eight", f"{COPIES} × {ENVIRONMENT} in one process, batched", 0.8),
        )
    ]


def recording() -> Ratio:
    """How many steps a second the recorder gets into a ledger on disk."""
    numbers, observation = count(1), np.zeros(4, np.float32)
    with tempfile.TemporaryDirectory() as directory, Ledger.create(Path(directory, "ledger.db")) as ledger:
        recorder = Recorder(ledger)

        def batch() -> None:
            for _ in range(TRIALS):
                recorder.add((next(numbers), 1, 1, None, "{}", observation, 1.0, 0.0))
            recorder.flush()

        best = best_of(BATCHES, {"batch": batch})
        recorder.close()
    return Ratio("live: trials/s into the ledger", TRIALS / best["batch"], 50_000, unit="/s", at_least=True)


class Tick:
    """The least that can be called a live environment: the memory that is used with it is ours."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    observation = np.zeros(4, np.float32)

    def __init__(self) -> None:
        self._left = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        del seed, options
        self._left = 500
        return self.observation.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step nearer to the end."""
        del action
        self._left -= 1
        return self.observation.copy(), 1.0, self._left == 0, False, {}

    def close(self) -> None:
        """Nothing is held."""


def wander() -> None:
    """A million recorded steps in this process; prints its peak memory halfway and at the end, in MB."""
    peaks = []
    with tempfile.TemporaryDirectory() as directory:
        env = make_env(Path(directory), "benchmarks.live:Tick", "steps")
        for _ in range(2):
            walk(env, MANY // 2)()
            peaks.append(_peak_mb())
        env.close()
    print(json.dumps(peaks))


def _peak_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def staying_flat() -> list[Ratio]:
    """The memory of a million steps, in a separate process."""
    command = [sys.executable, "-c", "from benchmarks.live import wander; wander()"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    half, whole = json.loads(done.stdout.splitlines()[-1])
    return [
        Ratio(f"live: peak memory over {MANY:,} recorded steps", whole, MOST_MB, unit="MB"),
        Ratio("live: peak memory of all of them against the first half", whole / half, 1.1),
    ]


def run() -> list[Ratio]:
    """Speed, recording and memory."""
    return [*stepping(), *isolated(), recording(), *staying_flat()]


if __name__ == "__main__":
    print(*run(), sep="\n")
