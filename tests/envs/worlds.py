"""Small worlds for adapters: a workload that calls a function in this process, and servers that do not behave."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from loopwright.core.outcome import Outcome
from loopwright.core.reward import Identity, Objectives, Penalties
from loopwright.core.trial import Result
from loopwright.envs.live.env import LiveEnv
from loopwright.envs.search import SearchEnv, TrialRules
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.trial_book import TrialBook
from loopwright.spaces.parameter import parameter
from loopwright.spaces.space import Draws, EnvParamConfig, Space
from loopwright.workloads.base import Job, Workload


class Called(Workload):
    """Calls a function of the arguments; it gives a number, metrics, or a result."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls, self.most, self._flying = function, list[dict[str, Any]](), 0, 0

    async def run(self, job: Job) -> Result:
        self.calls.append(dict(job.arguments))
        self._flying += 1
        self.most = max(self.most, self._flying)
        await asyncio.sleep(0)
        self._flying -= 1
        value = self.function(**job.arguments)
        if isinstance(value, Result):
            return value
        return Result(Outcome.OK, value if isinstance(value, dict) else {"y": float(value)})


def book_in(directory: Path, name: str = "run", **options: Any) -> TrialBook:
    folder = directory / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ledger.db"
    ledger = Ledger.open(path) if path.exists() else Ledger.create(path, state={"id": "test"})
    ledger.close_episode()
    return TrialBook(name, folder, ledger, **options)


def world(
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
    """A trial environment over a function; arguments as they are written in TOML."""
    configs = {name: EnvParamConfig(**how) for name, how in (env_params or {}).items()}
    space = Space({name: parameter(value) for name, value in arguments.items()}, constraints, frozenset(configs))
    return kind(
        book_in(directory, budget=budget, count_cached=count_cached),
        space=space,
        workload=Called(function),
        draws=Draws(0, space.parameters, configs),
        objectives=Objectives((Identity(metrics=("y",)),)),
        metric_names=metrics,
        rules=TrialRules(**rules),
    )


class Line:
    """Walks along a line for five steps; `script` may replace what a step gives, by its number."""

    observation_space = spaces.Box(-100, 100, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, script: Mapping[int, Any] | None = None) -> None:
        self.script, self.steps, self.resets, self.closed = dict(script or {}), 0, list[Any](), 0

    def reset(self, *, seed=None, options=None):
        self.resets.append(options)
        self.position, self.left = 0.0, 5
        return self._seen(), {}

    def step(self, action):
        self.steps += 1
        self.left -= 1
        self.position += int(action) - 1
        scripted = self.script.get(self.steps)
        if isinstance(scripted, BaseException):
            raise scripted
        if scripted is not None:
            return scripted
        return self._seen(), float(self.position), self.left == 0, False, {}

    def close(self):
        self.closed += 1

    def _seen(self):
        return np.array([self.position, self.left], np.float32)


class Shown(Line):
    """A line that shows samples of any space, and takes actions of any other."""

    def __init__(self, observation_space: Any, action_space: Any = None) -> None:
        super().__init__()
        self.observation_space = observation_space
        if action_space is not None:
            self.action_space = action_space

    def step(self, action):
        self.left -= 1
        return self._seen(), 0.0, self.left == 0, False, {}

    def _seen(self):
        return self.observation_space.sample()


def live(
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
    """A live environment over an object of this process."""
    parameters = {name: parameter(list(values)) for name, values in (drawn or {}).items()}
    configs = {name: EnvParamConfig(encoding=(encodings or {}).get(name, "categorical")) for name in parameters}
    draws = Draws(0, parameters, configs)
    how: dict[str, Any] = {"draws": draws, "record": record, "timeout_s": timeout_s}
    return LiveEnv(book_in(directory, budget=budget), server=server or Line(), penalties=penalties, **how)


BAD_ANSWERS = {
    "NaN": (np.array([math.nan, 0], np.float32), 0.0, False, False, {}),
    "infinity": (np.array([math.inf, 0], np.float32), 0.0, False, False, {}),
    "shape": (np.zeros(3, np.float32), 0.0, False, False, {}),
    "dtype": (np.zeros(2, np.float64), 0.0, False, False, {}),
    "no array": ([0.0, 0.0], 0.0, False, False, {}),
    "NaN reward": (np.zeros(2, np.float32), math.nan, False, False, {}),
    "text reward": (np.zeros(2, np.float32), "much", False, False, {}),
    "no reward": (np.zeros(2, np.float32), None, False, False, {}),
    "four values": (np.zeros(2, np.float32), 0.0, False, {}),
    "nothing": 5,
    "reward as text": (np.zeros(2, np.float32), "1.0", False, False, {}),
    "reward in a list": (np.zeros(2, np.float32), np.array([1.0]), False, False, {}),
    "true as reward": (np.zeros(2, np.float32), True, False, False, {}),
    "endless reward": (np.zeros(2, np.float32), 10**400, False, False, {}),
    "text as flag": (np.zeros(2, np.float32), 0.0, "no", False, {}),
    "no flag": (np.zeros(2, np.float32), 0.0, False, None, {}),
    "number as flag": (np.zeros(2, np.float32), 0.0, 0, False, {}),
    "no info": (np.zeros(2, np.float32), 0.0, False, False, None),
}


def wait_until(condition: Callable[[], bool], patience_s: float = 30.0) -> None:
    until = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.02)
