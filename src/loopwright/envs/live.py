"""Live environments: a server steps them, no process is started per trial, and each step is a trial."""

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import Field, field_validator, model_validator

from loopwright.core.config import Config
from loopwright.core.env import Env, Terms
from loopwright.core.errors import InvalidAction, Problem
from loopwright.core.observer import Observer, Observers
from loopwright.core.outcome import FAULT_OF, Outcome
from loopwright.core.recorder import Recorder
from loopwright.core.reward import Reward
from loopwright.core.run import Run
from loopwright.core.trial import Proposal, Regime, Result, Trial
from loopwright.envs.server import GymServer, ServerError, ServerLost, check_server_class, make_server
from loopwright.spaces.draws import Draws
from loopwright.spaces.parameter import Fixed, Parameter, parameter

_PLAIN = '{"parts":{},"more":[]}'


class LiveConfig(Config):
    """A live environment: an object in this process, or a server at an address."""

    env_class: str | None = None
    """`module:Class` (or `gymnasium:CartPole-v1`), made in this process with those of `args` that it takes."""
    address: str | None = Field(default=None, pattern=r"^(unix://|tcp://).+")
    """Where a server listens: `unix:///run/sim.sock` or `tcp://host:port`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments: fixed ones for the environment's construction, lists for [run.env_params] to draw per episode."""
    record: Literal["steps", "episodes"] = "steps"
    """Whether each step gets a row in the ledger, or each episode (the steps are counted all the same)."""
    timeout_s: float = Field(default=30.0, gt=0)
    """How long a server may take for one step."""

    @field_validator("args")
    @classmethod
    def _parameters(cls, written: dict[str, Any]) -> dict[str, Parameter]:
        return {name: parameter(value) for name, value in written.items()}

    @model_validator(mode="after")
    def _one_of(self) -> "LiveConfig":
        if (self.env_class is None) == (self.address is None):
            raise ValueError("give either env_class (in process) or address (a server)")
        return self

    def fixed(self) -> dict[str, Any]:
        """The arguments for the environment's construction."""
        return {name: p.value for name, p in self.args.items() if isinstance(p, Fixed)}

    def problems(self, home: Path, drawn: Collection[str]) -> list[Problem]:
        """Everything that can be found wrong without starting it."""
        found = []
        if self.env_class is not None and (reason := check_server_class(self.env_class, home)):
            found.append(Problem("env_class", f"{self.env_class!r}: {reason}"))
        found += [
            Problem(f"args.{name}", "has several values; let the environment draw it: [run.env_params." + name + "].")
            for name, p in self.args.items()
            if not isinstance(p, Fixed) and name not in drawn
        ]
        return found

    def connect(self, home: Path) -> GymServer:
        """The environment itself, made here or reached at its address."""
        if self.env_class is not None:
            return make_server(self.env_class, self.fixed(), home)
        from loopwright.envs.remote import RemoteServer

        return RemoteServer(self.address or "", timeout_s=self.timeout_s)


class LiveEnv(Env):
    """Steps a server and keeps the books. Synchronous: an event loop per step would cost three quarters of the speed.

    The regime is drawn per episode and handed to the server in `reset(options={"env_params": …})`.
    """

    metric_names = ("observation",)

    def __init__(
        self, run: Run, terms: Terms, observers: Observers, *, server: GymServer, draws: Draws, record: str = "steps"
    ) -> None:
        # numpy is a core dependency, but this module is imported with every scenario.
        from loopwright.envs.reading import checker

        super().__init__(run, terms, observers)
        self.server, self.draws = server, draws
        self._whole = record == "episodes"
        self._recorder = Recorder(run.ledger)
        self._add = self._recorder.add
        self._watched = bool(list(observers))
        self._open = self._begun = False
        self._seen: Any = None
        self._regime: dict[str, Any] = {}
        self._regime_text = "{}"
        self._draw: int | None = None
        self._first, self._began_at, self._return, self._worst = 0, 0.0, 0.0, 0.0
        self._problem = checker(server.observation_space)

    def sample(self, draw: int) -> Regime:
        return self.draws.sample(draw)

    # -- episodes -----------------------------------------------------------------------------------------------

    def start_episode(
        self, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the server under the regime that waits; an episode in progress ends as it stands.

        Resetting again before the first step burns neither a draw nor a number.
        """
        if self._begun:
            self._end_episode(truncated=True)
        waiting = self.reset()
        self._regime, self._draw = dict(waiting.context), waiting.draw
        self._regime_text = orjson.dumps(self._regime).decode()
        given = {**(options or {}), **({"env_params": self._regime} if self._regime else {})}
        seen, info = self.server.reset(seed=seed, options=given or None)
        self._check(seen)
        self._seen, self._open = seen, True
        return seen, {**info, "trial": self.run.step, **({"env_params": self._regime} if self._regime else {})}

    def _begin_episode(self, number: int) -> None:
        """The first step: only now is the draw used up."""
        self._begun, self._first, self._return, self._began_at = True, number, 0.0, time.time()
        self.run.group += 1
        self._pending.clear()
        if self._draw is not None:
            self.run.draw = self._draw

    def _end_episode(self, *, truncated: bool) -> None:
        last = self.run.step
        facts = {
            "episode": self.run.group,
            "first": self._first,
            "last": last,
            "return": self._return,
            "length": last - self._first + 1,
            "regime": self._regime,
            "truncated": truncated,
        }
        if self._whole:
            row = (last, self.run.group, "null", self._draw, self._regime_text, Outcome.OK, None, "", self._return)
            self._recorder.add_row((*row, _PLAIN, orjson.dumps(facts).decode(), self._began_at, time.time()))
        self._recorder.add_episode(last, facts)
        self._begun = self._open = False

    # -- steps --------------------------------------------------------------------------------------------------

    def step_now(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step, one trial. A server that dies or hangs is `lost`: it is recorded, and raised."""
        if not self._open:
            raise InvalidAction("the episode is over: call reset() first")
        number = self.run.increment_step()
        if not self._begun:
            self._begin_episode(number)
        if self._watched:
            self._observers.before(self._trial(number, action))
        try:
            seen, reward, terminated, truncated, info = self.server.step(action)
            reward = float(reward)
            self._check(seen)
            if not math.isfinite(reward):
                raise ServerError(f"the server gave the reward {reward}")
        except ServerLost as error:
            self._fail(number, action, Outcome.LOST, str(error))
            self._recorder.flush()
            raise
        except (ServerError, TypeError, ValueError) as error:
            return self._broken(number, action, str(error))
        self._seen = seen
        self._return += reward
        if reward < self._worst:
            self._worst = reward
        if not self._whole:
            self._add((number, self.run.group, action, self._draw, self._regime_text, seen, reward, time.time()))
        if self._watched:
            done = replace(self._trial(number, action), outcome=Outcome.OK, reward=Reward(reward))
            self._observers.after(done)
        if number == self.terms.budget:
            truncated = True
        if terminated or truncated:
            self._end_episode(truncated=bool(truncated))
        info["trial"] = number
        if self._regime:
            info["env_params"] = self._regime
        return seen, reward, bool(terminated), bool(truncated), info

    def _check(self, seen: Any) -> None:
        """Refuse what is not of the declared shape and type, or not a number."""
        if problem := self._problem(seen):
            raise ServerError(problem)

    def _broken(self, number: int, action: Any, reason: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """A step without a usable answer: a failed trial that ends its episode, told as a penalty."""
        self._fail(number, action, Outcome.METRIC_MISSING, reason)
        penalty = self.terms.penalties.metric_failure
        told = self._worst - 1.0 if penalty is None else penalty
        return self._seen, told, False, True, {"trial": number, "env_params": self._regime, "error": reason}

    def _fail(self, number: int, action: Any, outcome: Outcome, reason: str) -> None:
        made, at = orjson.dumps(action, option=orjson.OPT_SERIALIZE_NUMPY, default=repr).decode(), time.time()
        fault = FAULT_OF[outcome]
        row = (
            number,
            self.run.group,
            made,
            self._draw,
            self._regime_text,
            outcome,
            fault,
            reason,
            None,
            None,
            "{}",
            at,
            at,
        )
        if not self._whole:
            self._recorder.add_row(row)
        if self._watched:
            self._observers.after(replace(self._trial(number, action), outcome=outcome, fault=fault, reason=reason))
        self._end_episode(truncated=True)

    def _trial(self, number: int, action: Any) -> Trial:
        plain = action.tolist() if hasattr(action, "tolist") else action
        return Trial(number, {"action": plain}, "", self.run.group, draw=self._draw, regime=self._regime)

    async def measure(self, trial: Trial) -> Result:
        raise InvalidAction("a live environment is stepped by step_now()")

    def history(self) -> Iterator[Proposal]:
        """Nothing: what a policy learned from live steps is in its checkpoint."""
        return iter(())

    # -- the rest -----------------------------------------------------------------------------------------------

    def watch(self, observers: Sequence[Observer]) -> None:
        super().watch(observers)
        self._watched = bool(list(self._observers))

    def flush(self) -> None:
        """Have every step in the ledger: before a checkpoint, and at the end."""
        self._recorder.flush()

    def shut(self) -> None:
        """End the episode in progress, write everything, close the server."""
        if self._begun:
            self._end_episode(truncated=True)
        self._recorder.close()
        self.server.close()
