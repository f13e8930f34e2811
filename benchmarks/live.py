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
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

import loopwright
from benchmarks.measure import Ratio, best_of
from benchmarks.spine import MEMORY
from loopwright.agents.rl.vec_envs import LiveVecEnv
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


def make_env(home: Path, env_class: str, record: str, *, isolate: bool = False, num_envs: int | None = None) -> Any:
    """A live run as an environment, with its record in `home`."""
    file = home / f"{record}-{isolate}.toml"
    file.write_text(SCENARIO.format(env_class=env_class, record=record, isolate=str(isolate).lower()))
    return loopwright.make(file, output=home / f"out-{record}-{isolate}", num_envs=num_envs)


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


def isolated() -> Ratio:
    """Steps per second of an environment in a process of its own, against SB3's `SubprocVecEnv`."""
    actions = [np.full(1, number & 1) for number in range(2)]
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as directory:
        ours = make_env(Path(directory), f"gymnasium:{ENVIRONMENT}", "steps", isolate=True)
        theirs = SubprocVecEnv([lambda: gymnasium.make(ENVIRONMENT)])

        def step_theirs() -> None:
            theirs.reset()
            for number in range(ISOLATED_STEPS):
                theirs.step(actions[number & 1])

        best = best_of(ISOLATED_ROUNDS, {"ours": walk(ours, ISOLATED_STEPS), "theirs": step_theirs})
        for env in (ours, theirs):
            env.close()
    rate = {name: ISOLATED_STEPS / taken_s for name, taken_s in best.items()}
    return Ratio(
        f"live: {ENVIRONMENT} with every step recorded with isolate, against SubprocVecEnv",
        rate["ours"] / rate["theirs"],
        0.5,
        at_least=True,
        detail=f"{rate['ours']:,.0f} steps/s, SubprocVecEnv {rate['theirs']:,.0f}",
    )


def step_vector(env: Any, steps: int) -> Callable[[], None]:
    """So many steps of all environments together; the same actions for everybody."""
    actions = [np.full(COPIES, number & 1) for number in range(2)]
    flush: Callable[[], None] = getattr(env, "flush", lambda: None)

    def stepped() -> None:
        env.seed(1)
        env.reset()
        for number in range(steps // COPIES):
            env.step(actions[number & 1])
        flush()

    return stepped


def vectorised(peer: type[Any], *, isolate: bool, steps: int, rounds: int) -> Ratio:
    """Eight environments as SB3 steps them, ours with whole episodes recorded, against SB3's own."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as directory:
        made = make_env(Path(directory), f"gymnasium:{ENVIRONMENT}", "episodes", isolate=isolate, num_envs=COPIES)
        ours: Any = LiveVecEnv(made.inner)
        ours.flush = made.inner.flush
        theirs = peer([lambda: gymnasium.make(ENVIRONMENT)] * COPIES)
        best = best_of(rounds, {"ours": step_vector(ours, steps), "theirs": step_vector(theirs, steps)})
        made.close()
        theirs.close()
    rate = {name: steps / taken_s for name, taken_s in best.items()}
    where = "in one child process" if isolate else "in this process"
    return Ratio(
        f"live: {COPIES} × {ENVIRONMENT} {where} with whole episodes recorded, against {peer.__name__}",
        rate["ours"] / rate["theirs"],
        0.8,
        at_least=True,
        detail=f"{rate['ours']:,.0f} steps/s, {peer.__name__} {rate['theirs']:,.0f}",
    )


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
    vectors = (
        vectorised(DummyVecEnv, isolate=False, steps=STEPS, rounds=ROUNDS),
        vectorised(SubprocVecEnv, isolate=True, steps=ISOLATED_STEPS, rounds=ISOLATED_ROUNDS),
    )
    return [*stepping(), isolated(), *vectors, recording(), *staying_flat()]


if __name__ == "__main__":
    print(*run(), sep="\n")
