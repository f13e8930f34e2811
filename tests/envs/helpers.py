"""Small environments for tests: a workload that calls a function, and live servers that follow a script."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from loopwright.core.outcome import Outcome
from loopwright.core.trial import Identity, Objectives, Penalties, Result, Trial
from loopwright.envs.live.env import LiveEnv
from loopwright.envs.search import SearchEnv, TrialRules
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.trial_book import TrialBook
from loopwright.spaces.parameter import parameter
from loopwright.spaces.space import Draws, EnvParamConfig, Space
from loopwright.workloads.base import Job, Workload


class CountingWorkload(Workload):
    """Calls a function of the arguments, which returns a number, metrics or a Result. Counts concurrent calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls, self.max_in_flight, self._in_flight = function, list[dict[str, Any]](), 0, 0

    async def run(self, job: Job) -> Result:
        self.calls.append(dict(job.arguments))
        self._in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self._in_flight)
        await asyncio.sleep(0)
        self._in_flight -= 1
        value = self.function(**job.arguments)
        if isinstance(value, Result):
            return value
        return Result(Outcome.OK, value if isinstance(value, dict) else {"y": float(value)})


def trial_book(directory: Path, name: str = "run", **options: Any) -> TrialBook:
    folder = directory / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ledger.db"
    ledger = Ledger.open(path) if path.exists() else Ledger.create(path, state={"id": "test"})
    ledger.close_episodes()
    return TrialBook(name, folder, ledger, **options)


def search_env(
    directory: Path,
    arguments: Mapping[str, Any],
    function: Callable[..., Any] = lambda **_: 1.0,
    *,
    env_params: Mapping[str, Any] | None = None,
    constraints: tuple[str, ...] = (),
    kind: type[SearchEnv] = SearchEnv,
    metrics: tuple[str, ...] = ("y",),
    budget: int | None = None,
    count_cached: bool = True,
    **rules: Any,
) -> SearchEnv:
    """A search environment over a function; arguments as in TOML."""
    configs = {name: EnvParamConfig(**config) for name, config in (env_params or {}).items()}
    space = Space({name: parameter(value) for name, value in arguments.items()}, constraints, frozenset(configs))
    return kind(
        trial_book(directory, budget=budget, count_cached=count_cached),
        space=space,
        workload=CountingWorkload(function),
        draws=Draws(0, space.parameters, configs),
        objectives=Objectives((Identity(metrics=("y",)),)),
        metric_names=metrics,
        rules=TrialRules(**rules),
    )


class LineServer:
    """Walks along a line for five steps. `script` replaces the result of a step, by its number."""

    observation_space = spaces.Box(-100, 100, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, script: Mapping[int, Any] | None = None) -> None:
        self.script, self.steps, self.resets, self.closed = dict(script or {}), 0, list[Any](), 0

    def reset(self, *, seed=None, options=None):
        self.resets.append(options)
        self.position, self.left = 0.0, 5
        return self._observation(), {"env_params": (options or {}).get("env_params", {})}

    def step(self, action):
        self.steps += 1
        self.left -= 1
        self.position += int(action) - 1
        scripted = self.script.get(self.steps)
        if isinstance(scripted, BaseException):
            raise scripted
        if scripted is not None:
            return scripted
        return self._observation(), float(self.position), self.left == 0, False, {}

    def close(self):
        self.closed += 1

    def _observation(self):
        return np.array([self.position, self.left], np.float32)


class SampleServer(LineServer):
    """Returns samples of any observation space, and accepts actions of any action space."""

    def __init__(self, observation_space: Any, action_space: Any = None) -> None:
        super().__init__()
        self.observation_space = observation_space
        if action_space is not None:
            self.action_space = action_space

    def step(self, action):
        self.left -= 1
        return self._observation(), 0.0, self.left == 0, False, {}

    def _observation(self):
        return self.observation_space.sample()


def live_env(
    directory: Path,
    server: Any = None,
    *,
    drawn: Mapping[str, Any] | None = None,
    encodings: Mapping[str, Any] | None = None,
    record: str = "steps",
    timeout_s: float | None = None,
    budget: int | None = None,
    penalties: Penalties | None = None,
):
    """A live environment over a server in this process."""
    parameters = {name: parameter(list(values)) for name, values in (drawn or {}).items()}
    configs = {name: EnvParamConfig(encoding=(encodings or {}).get(name, "categorical")) for name in parameters}
    draws = Draws(0, parameters, configs)
    how: dict[str, Any] = {"draws": draws, "record": record, "timeout_s": timeout_s}
    return LiveEnv(trial_book(directory, budget=budget), server=server or LineServer(), penalties=penalties, **how)


BAD_STEPS = {
    "NaN": (np.array([math.nan, 0], np.float32), 0.0, False, False, {}),
    "infinity": (np.array([math.inf, 0], np.float32), 0.0, False, False, {}),
    "shape": (np.zeros(3, np.float32), 0.0, False, False, {}),
    "dtype": (np.zeros(2, np.float64), 0.0, False, False, {}),
    "not an array": ([0.0, 0.0], 0.0, False, False, {}),
    "NaN reward": (np.zeros(2, np.float32), math.nan, False, False, {}),
    "text reward": (np.zeros(2, np.float32), "much", False, False, {}),
    "missing reward": (np.zeros(2, np.float32), None, False, False, {}),
    "four values": (np.zeros(2, np.float32), 0.0, False, {}),
    "not a tuple": 5,
    "reward as text": (np.zeros(2, np.float32), "1.0", False, False, {}),
    "reward in a list": (np.zeros(2, np.float32), np.array([1.0]), False, False, {}),
    "bool as reward": (np.zeros(2, np.float32), True, False, False, {}),
    "overflowing reward": (np.zeros(2, np.float32), 10**400, False, False, {}),
    "text as flag": (np.zeros(2, np.float32), 0.0, "no", False, {}),
    "missing flag": (np.zeros(2, np.float32), 0.0, False, None, {}),
    "number as flag": (np.zeros(2, np.float32), 0.0, 0, False, {}),
    "missing info": (np.zeros(2, np.float32), 0.0, False, False, None),
}


def play(env: LiveEnv, steps: int, action: Any = 2) -> list[Any]:
    """Take steps, and reset where an episode ends. Returns the results of the steps."""
    results: list[Any] = []
    is_over = True
    for _ in range(steps):
        if is_over:
            env.start_episode()
        results.append(env.step_now(action))
        is_over = results[-1][2] or results[-1][3]
    return results


def rows(env: LiveEnv) -> list[Trial]:
    env.flush()
    return list(env.book.ledger.trials())


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition was not met in time"
        time.sleep(0.02)
