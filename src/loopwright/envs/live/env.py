"""Live environments: a server steps them, no process is started per trial, and each step is a trial."""

import logging
import math
import time
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import orjson
from pydantic import Field, field_validator, model_validator

from loopwright.core.config import Config
from loopwright.core.errors import InvalidAction, LoopwrightError, Problem
from loopwright.core.outcome import FAULT_OF, Fault, Outcome
from loopwright.core.reward import Objectives, Penalties, Reward, ServerReward
from loopwright.core.trial import Regime, Trial
from loopwright.envs.live.answer import flag, real, shown, unusable
from loopwright.envs.live.probe import Declared, declared
from loopwright.envs.live.server import (
    GymServer,
    ServerError,
    ServerLost,
    check_server_class,
    make_server,
)
from loopwright.envs.live.watchdog import Hung, Watchdog
from loopwright.ledger.recorder import Recorder, as_json
from loopwright.ledger.trial_book import RunStopped, TrialBook
from loopwright.spaces.draws import Draws
from loopwright.spaces.parameter import Fixed, Parameter, parameter

log = logging.getLogger(__name__)
_PLAIN = '{"parts":{},"more":[]}'
_FINE = (Outcome.OK, None, "")
_CLOSED = "the environment is closed: make another one"


def below(worst: float) -> float:
    """What a learner is told for a failure where no penalty is set: less than the worst reward, in float32 too."""
    return worst - max(1.0, 0.1 * abs(worst))


def _taken_name(observation_space: Any) -> str | None:
    """Why the regime cannot stand beside what a server shows: the place is taken."""
    parts = getattr(observation_space, "spaces", None)
    if not isinstance(parts, dict) or "context" not in parts:
        return None
    return "the server's observations have a part 'context', where the drawn env_params go; give it another name"


class LiveConfig(Config):
    """A live environment: an object in this process, or a server at an address."""

    env_class: str | None = None
    """`module:Class` (or `gymnasium:CartPole-v1`), made in this process with those of `args` that it takes."""
    address: str | None = None
    """Where a server listens: `unix:///run/sim.sock` or `tcp://host:port`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments: fixed ones for the construction of `env_class` (a server at an address was constructed already), lists
    for [run.env_params] to draw per episode."""
    record: Literal["steps", "episodes"] = "steps"
    """Whether each step gets a row in the ledger, or each episode (the steps are counted all the same)."""
    timeout_s: float = Field(default=30.0, gt=0)
    """How long a step or a reset may take before the server counts as lost. In this process, native code that does not
    return cannot be interrupted: such a server belongs at an address."""

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
        found = self._problems_there() if self.env_class is None else self._problems_here(home)
        found += [
            Problem(f"args.{name}", "has several values; let the environment draw it: [run.env_params." + name + "].")
            for name, p in self.args.items()
            if not isinstance(p, Fixed) and name not in drawn
        ]
        if drawn and (reason := _taken_name(self.spaces(home).observation_space)):
            found.append(Problem("env_class", f"{reason}."))
        return found

    def _problems_here(self, home: Path) -> list[Problem]:
        reason = check_server_class(self.env_class or "", home) or self.spaces(home).problem
        return [Problem("env_class", reason)] if reason else []

    def _problems_there(self) -> list[Problem]:
        from loopwright.envs.live.channel import Address, AddressError

        found = []
        try:
            address = Address.parse(self.address or "")
            if address.path is None and address.port == 0:
                found.append(Problem("address", f"nobody can be reached at port 0 ({self.address})."))
        except AddressError as error:
            found.append(Problem("address", str(error)))
        advice = "is fixed, and a server at an address is made where it runs: give it there"
        found += [
            Problem(f"args.{name}", f"{advice}, serve-env --arg {name}=…, and remove it here.") for name in self.fixed()
        ]
        return found

    def spaces(self, home: Path) -> Declared:
        """The server's spaces, as far as they can be told before the run starts."""
        return Declared() if self.env_class is None else declared(self.env_class, self.fixed(), home)

    def connect(self, home: Path) -> GymServer:
        """The environment itself, made here or reached at its address."""
        if self.env_class is not None:
            return make_server(self.env_class, self.fixed(), home)
        from loopwright.envs.live.remote import RemoteServer

        return RemoteServer(self.address or "", timeout_s=self.timeout_s)


@dataclass(frozen=True)
class _Episode:
    """What is known of an episode from its first step on."""

    first: int
    group: int
    draw: int | None
    regime: Regime
    regime_text: str
    began_at: float

    def facts(self, last: int, total: float, *, truncated: bool) -> dict[str, Any]:
        """What ledger and report keep of it."""
        return {
            "episode": self.group,
            "first": self.first,
            "last": last,
            "return": total,
            "length": last - self.first + 1,
            "regime": self.regime,
            "truncated": truncated,
        }

    def row(self, facts: Mapping[str, Any], how: tuple[Outcome, Fault | None, str]) -> tuple[Any, ...]:
        """The row that it is with `record = "episodes"`."""
        scored = (facts["return"], _PLAIN) if how is _FINE else (None, None)
        row = (facts["last"], self.group, "null", self.draw, self.regime_text, *how, *scored)
        return *row, orjson.dumps(facts).decode(), self.began_at, time.time()


class LiveEnv:
    """Steps a server and keeps the books. Synchronous: an event loop per step would cost three quarters of the speed.

    The regime is drawn per episode and handed to the server in `reset(options={"env_params": …})`.
    """

    metric_names = ("observation",)
    objectives = Objectives((ServerReward(),))

    def __init__(
        self,
        book: TrialBook,
        *,
        server: GymServer,
        draws: Draws,
        penalties: Penalties | None = None,
        record: str = "steps",
        timeout_s: float | None = None,
    ) -> None:
        # numpy is a core dependency, but this module is imported with every scenario.
        from loopwright.envs.live.reading import checker, holds_array, holds_number, keeper

        if draws.values and (reason := _taken_name(server.observation_space)):
            server.close()
            raise ServerError(reason)
        self.book, self.server, self.draws = book, server, draws
        self.penalties = penalties or Penalties()
        self._whole = record == "episodes"
        self._watchdog = Watchdog(timeout_s)
        self._so_far: tuple[_Episode, int, float] | None = None
        self._recorder = Recorder(book.ledger, unfinished=self._unfinished)
        self._add = self._recorder.add
        self._observers = book.observers
        self._open = self._begun = self._shut = False
        self._seen: Any = None
        self._regime: dict[str, Any] = {}
        self._regime_text = "{}"
        self._draw: int | None = None
        self._episode, self._return = _Episode(0, 0, None, {}, "{}", 0.0), 0.0
        self._worst = min(0.0, book.ledger.worst() or 0.0)
        self._problem = checker(server.observation_space)
        self._keep, self._arrays = keeper(server.observation_space), holds_array(server.observation_space)
        self._numbers = holds_number(server.action_space)
        book.when_stopped(self._stop)

    # -- episodes -----------------------------------------------------------------------------------------------

    def start_episode(
        self, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the server under the regime that waits; an episode in progress ends as it stands.

        Resetting again before the first step burns neither a draw nor a number.
        """
        if self._begun:
            self._end_episode(truncated=True)
        if self.book.stopping:
            raise RunStopped
        draw = self.book.draw + 1
        self._regime = dict(self.draws.sample(draw))
        self._draw = draw if self._regime else None
        self._regime_text = orjson.dumps(self._regime).decode()
        given = {**(options or {}), **({"env_params": self._regime} if self._regime else {})}
        seen, info = self._reset(seed, given or None)
        self._seen, self._open = seen, not self.book.stopping
        return seen, {**info, "trial": self.book.step, **({"env_params": dict(self._regime)} if self._regime else {})}

    def _reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """The server's own reset. No trial is in progress, so that a failure has no row: it is raised."""
        if self._shut:
            raise InvalidAction(_CLOSED)
        try:
            answer = self._watchdog.guard("reset", lambda: self.server.reset(seed=seed, options=options))
        except (Exception, SystemExit) as error:
            if isinstance(error, LoopwrightError):
                raise
            raise ServerLost(f"the server failed in 'reset': {type(error).__name__}: {error}") from error
        try:
            seen, info = answer
        except (TypeError, ValueError):
            raise ServerError(f"'reset' gave {shown(answer)} where (observation, info) is due") from None
        if problem := self._problem(seen):
            raise ServerError(f"'reset' gave {problem}")
        if not isinstance(info, dict):
            raise ServerError(f"'reset' gave info: {shown(info)} where a dict is due")
        return seen, info

    def _begin_episode(self, number: int) -> None:
        """The first step: only now is the draw used up."""
        self._begun, self._return = True, 0.0
        self.book.new_group()
        if self._draw is not None:
            self.book.draw = self._draw
        self._episode = _Episode(number, self.book.group, self._draw, self._regime, self._regime_text, time.time())

    def _end_episode(self, *, truncated: bool, how: tuple[Outcome, Fault | None, str] = _FINE) -> None:
        last = self.book.step
        facts = self._episode.facts(last, self._return, truncated=truncated)
        if self._whole:
            self._recorder.add_row(self._episode.row(facts, how))
        self._recorder.add_episode(last, facts)
        self._begun = self._open = False
        self._so_far = None

    def _unfinished(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The episode in progress as it would stand if the process died now; asked by the recorder's thread."""
        if (so_far := self._so_far) is None:
            return None
        episode, last, total = so_far
        facts = episode.facts(last, total, truncated=True)
        return episode.row(facts, _FINE), facts

    # -- steps --------------------------------------------------------------------------------------------------

    def step_now(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step, one trial. A server that dies or hangs is `lost`: it is recorded, and raised."""
        if not self._open:
            self._refuse()
        number = self.book.increment_step()
        if not self._begun:
            self._begin_episode(number)
        if self._observers:
            self._observers.before(self._trial(number, action))
        watchdog = self._watchdog  # `bites` looks for this name
        watchdog.call = number
        try:
            answer: Any = self.server.step(action)
            watchdog.call = 0
        except BaseException as error:  # noqa: BLE001  a server of the user's own may raise anything
            watchdog.call = 0
            return self._raised(number, action, error)
        try:
            seen, reward, terminated, truncated, info = answer
            # What is of the very type is the rule; the rest is looked at more closely, and more slowly.
            if type(reward) is not float:
                reward = real(reward)
            if type(terminated) is not bool:
                terminated = flag("terminated", terminated)
            if type(truncated) is not bool:
                truncated = flag("truncated", truncated)
            if problem := self._problem(seen):
                raise ServerError(problem)
            if not math.isfinite(reward):
                raise ServerError(f"reward: {reward} where a finite number is due")
            info["trial"] = number
        except (TypeError, ValueError) as error:
            return self._broken(number, action, Outcome.METRIC_MISSING, unusable(answer, error))
        self._seen = seen
        self._return += reward
        if reward < self._worst:
            self._worst = reward
        if not self._whole:
            # They are written later, and both may be arrays that their owners write the next step into.
            kept = seen.copy() if self._arrays else self._keep(seen)
            made = action if self._numbers else deepcopy(action)
            self._add((number, self.book.group, made, self._draw, self._regime_text, kept, reward, time.time()))
            if not number & 4095:
                # An episode may have no end.
                self._recorder.keep_up()
        else:
            # One object, so that the recorder's thread never sees the sum of another step.
            self._so_far = self._episode, number, self._return
        if self._observers:
            done = replace(self._trial(number, action), outcome=Outcome.OK, reward=Reward(reward))
            self._observers.after(done)
        if number == self.book.budget:
            truncated = True
        if terminated or truncated:
            self._end_episode(truncated=truncated)
        if self._regime:
            info["env_params"] = dict(self._regime)
        return seen, reward, terminated, truncated, info

    def _raised(self, number: int, action: Any, error: BaseException) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """The server gave no answer at all: it cannot read the action, it says why, or it is gone."""
        if isinstance(error, Hung):
            error = ServerLost(self._watchdog.reason("step"))
        elif not isinstance(error, Exception | SystemExit):
            raise error
        if isinstance(error, ServerError):
            return self._broken(number, action, Outcome.METRIC_MISSING, str(error))
        if isinstance(error, InvalidAction) or not self._readable(action):
            return self._broken(number, action, Outcome.INVALID, str(error) or repr(error))
        reason = str(error) if isinstance(error, ServerLost) else f"the server failed: {type(error).__name__}: {error}"
        self._fail(number, action, Outcome.LOST, reason)
        self._recorder.flush()
        if isinstance(error, ServerLost):
            raise error
        raise ServerLost(reason) from error

    def _readable(self, action: Any) -> bool:
        try:
            return bool(self.server.action_space.contains(action))
        except (TypeError, ValueError, AttributeError):
            return False

    def _refuse(self) -> NoReturn:
        if self.book.stopping:
            raise RunStopped
        raise InvalidAction(_CLOSED if self._shut else "the episode is over: call reset() first")

    def _stop(self) -> None:
        """No step from now on; asked by a signal, so that steps need not ask."""
        self._open = False

    def _broken(
        self, number: int, action: Any, outcome: Outcome, reason: str
    ) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """A step without a usable answer: a failed trial that ends its episode, told as a penalty."""
        self._fail(number, action, outcome, reason)
        penalty = self.penalties.for_outcome(outcome)
        told = below(self._worst) if penalty is None else penalty
        about = {"trial": number, "outcome": str(outcome), "error": reason}
        regime = {"env_params": dict(self._regime)} if self._regime else {}
        return self._keep(self._seen), told, False, True, {**about, **regime}

    def _fail(self, number: int, action: Any, outcome: Outcome, reason: str) -> None:
        made, at = as_json(action).decode(), time.time()
        fault = FAULT_OF[outcome]
        row = (
            number,
            self.book.group,
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
        if self._observers:
            self._observers.after(replace(self._trial(number, action), outcome=outcome, fault=fault, reason=reason))
        self._end_episode(truncated=True, how=(outcome, fault, reason))

    def _trial(self, number: int, action: Any) -> Trial:
        plain = action.tolist() if hasattr(action, "tolist") else action
        return Trial(number, {"action": plain}, "", self.book.group, draw=self._draw, regime=self._regime)

    # -- the rest -----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Have every step in the ledger: before a checkpoint, and at the end."""
        self._recorder.flush()

    def shut(self) -> None:
        """End the episode in progress, write everything, close the server. It can be called again."""
        if self._shut:
            return
        self._shut, self._open = True, False
        self.book.when_stopped(None)
        try:
            if self._begun:
                self._end_episode(truncated=True)
            self._recorder.close()
        finally:
            try:
                self._watchdog.guard("close", self.server.close)
            except (Exception, SystemExit) as error:  # noqa: BLE001  all is recorded, and it must not hide what came before
                failed = error if isinstance(error, ServerLost) else f"the server failed in 'close': {error!r}"
                log.warning("%s; it is left as it is", failed)
            finally:
                self._watchdog.close()
