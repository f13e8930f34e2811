"""The live environment: a server steps it, no process is started per trial, and each step is a trial."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, NoReturn

import orjson

from loopwright.core.errors import InvalidAction, LoopwrightError
from loopwright.core.outcome import FAULT_OF, Outcome
from loopwright.core.trial import Objectives, Penalties, Reward, ServerReward, Trial
from loopwright.envs.live.config import context_conflict
from loopwright.envs.live.episode_log import OK, Ending, EpisodeLog, LiveEpisode, StepFailures
from loopwright.envs.live.regime_server import refusal, unacknowledged
from loopwright.envs.live.server import (
    GymServer,
    ServerError,
    ServerLost,
    read_flag,
    read_reward,
    short_repr,
    step_problem,
)
from loopwright.envs.live.watchdog import Hung, Watchdog, calls_server
from loopwright.ledger.recorder import as_json
from loopwright.ledger.trial_book import RunStopped, TrialBook
from loopwright.spaces.space import Draws

log = logging.getLogger(__name__)
Step = tuple[Any, float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated, info."""
_CLOSED = "the environment is closed: make another one"


def failure_reward(worst: float) -> float:
    """The learner's reward for a failure without a penalty: less than the worst reward so far, in float32 too."""
    return worst - max(1.0, 0.1 * abs(worst))


class LiveEnv:
    """Steps a server and records each step as a trial.

        observation, info = env.start_episode()
        observation, reward, terminated, truncated, info = env.step_now(action)

    Several environments of one run are `slots` of the first, which numbers, records and closes for all of them.
    Synchronous, since an event loop per step would cost three quarters of the speed. The regime is drawn per episode
    and passed to the server in `reset(options={"env_params": …})`, which must acknowledge it in `info["env_params"]`.
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
        first: "LiveEnv | None" = None,
    ) -> None:
        from loopwright.envs.live.samples import checker, copier, is_array, is_immutable  # requires gymnasium

        if draws.values and (reason := context_conflict(server.observation_space)):
            server.close()
            raise ServerError(reason)
        self.book, self.server, self.draws = book, server, draws
        self.penalties = penalties or Penalties()
        self.make_server: Callable[[], GymServer] | None = None
        """Makes another server of the same kind, for evaluations; None if the server is the caller's own object."""
        self._records_episodes = record == "episodes"
        self._watchdog = Watchdog(timeout_s)
        self._progress: tuple[LiveEpisode, int, int, float] | None = None
        self.slots: list[LiveEnv] = [self] if first is None else first.slots
        if first is None:
            self._log = EpisodeLog(book.ledger, lambda: [one for slot in self.slots for one in slot._unfinished()])
            self._failures = StepFailures()
        else:
            self._log, self._failures = first._log, first._failures
            self._log.hold = True
            self.slots.append(self)
        self._recorder = self._log.recorder
        self._add = self._recorder.add
        self._observers = book.observers
        self._may_step = self._in_episode = self._closed = False
        self._observation: Any = None
        self._regime: dict[str, Any] = {}
        self._regime_json = "{}"
        self._draw: int | None = None
        self._episode, self._return = LiveEpisode(0, 0, None, {}, "{}", 0.0), 0.0
        self._last = self._length = 0
        self._worst = min(0.0, book.ledger.worst() or 0.0)
        self._check = checker(server.observation_space)
        self._copy, self._shows_array = copier(server.observation_space), is_array(server.observation_space)
        self._action_is_immutable = is_immutable(server.action_space)
        if first is None:
            book.when_stopped(self._stop)

    # -- episodes -----------------------------------------------------------------------------------------------

    def start_episode(
        self, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the server under the next regime. An episode in progress is truncated.

        Calling it again before the first step uses up neither a draw nor a number.
        """
        options = self._next_regime(options)
        return self._began(*self._reset_server(seed, options))

    def start_episodes(
        self, slots: Sequence[int], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> list[tuple[Any, dict[str, Any]]]:
        """Begin episodes of several slots; in one call, if their servers share a process."""
        episode_slots = [self.slots[slot] for slot in slots]
        reset_copies = getattr(self.server, "reset_copies", None)
        if reset_copies is None or len(episode_slots) < 2:
            return [slot.start_episode(seed, options) for slot, seed in zip(episode_slots, seeds, strict=True)]
        own_options = [slot._next_regime(options) for slot in episode_slots]
        requests = list(zip(slots, seeds, own_options, strict=True))
        results = self._watchdog.guard("reset", lambda: reset_copies(requests))
        return [
            # A reset that failed is tried again on its own.
            slot.start_episode(seed, options)
            if isinstance(result, Exception)
            else slot._began(*slot._check_reset(result))
            for slot, seed, result in zip(episode_slots, seeds, results, strict=True)
        ]

    def _next_regime(self, options: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Draw the regime of the next episode; the options for its reset."""
        if self._in_episode:
            self._end_episode(truncated=True, complete=False)
        if self.book.stopping:
            raise RunStopped
        # This slot may hold a draw already, and those that other slots hold are taken.
        draw = self._draw or 1 + max(self.book.draw, *(slot._draw or 0 for slot in self.slots))
        self._regime = dict(self.draws.sample(draw))
        self._draw = draw if self._regime else None
        self._regime_json = orjson.dumps(self._regime).decode()
        return {**(options or {}), **self._env_params()} or None

    def _began(self, observation: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._observation, self._may_step = observation, not self.book.stopping
        return observation, {**info, "trial": self.book.step, **self._env_params()}

    def _reset_server(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """The server's reset. No trial is in progress, so a failure is raised and not recorded."""
        if self._closed:
            raise InvalidAction(_CLOSED)
        try:
            result = self._watchdog.guard("reset", lambda: self.server.reset(seed=seed, options=options))
        except (Exception, SystemExit) as error:
            if isinstance(error, LoopwrightError):
                raise
            raise ServerLost(f"the server failed in 'reset': {type(error).__name__}: {error}") from error
        return self._check_reset(result)

    def _check_reset(self, result: Any) -> tuple[Any, dict[str, Any]]:
        try:
            observation, info = result
        except (TypeError, ValueError):
            raise ServerError(f"'reset' returned {short_repr(result)}, expected (observation, info)") from None
        if problem := self._check(observation):
            raise ServerError(f"'reset' returned {problem}")
        if not isinstance(info, dict):
            raise ServerError(f"'reset' returned info: expected a dict, got {short_repr(info)}")
        if self._regime and (names := unacknowledged(self._regime, info)):
            raise ServerError(refusal(names))
        return observation, info

    def _begin_episode(self, number: int) -> None:
        """The first step: only now is the draw used up."""
        self._in_episode, self._return, self._length = True, 0.0, 0
        self.book.group = group = self.book.group + 1
        if self._draw is not None:
            self.book.draw = max(self.book.draw, self._draw)
        self._episode = LiveEpisode(number, group, self._draw, self._regime, self._regime_json, time.time())

    def _end_episode(self, *, truncated: bool, complete: bool, ending: Ending = OK) -> None:
        self._failures.episodes += 1
        if self._length:  # otherwise it was interrupted in its first step
            last = self._last
            summary = self._episode.summary(last, self._length, self._return, truncated=truncated, complete=complete)
            self._log.add(last, summary, self._episode.row(summary, ending) if self._records_episodes else None)
        self._in_episode = self._may_step = False
        self._draw = self._progress = None

    def _unfinished(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The episode in progress, as it would be if the process died now. Called by the recorder's thread."""
        if (progress := self._progress) is None:
            return []
        episode, last, length, total = progress
        summary = episode.summary(last, length, total, truncated=True, complete=False)
        return [(episode.row(summary, OK), summary)]

    def _env_params(self) -> dict[str, Any]:
        return {"env_params": dict(self._regime)} if self._regime else {}

    # -- steps --------------------------------------------------------------------------------------------------

    @calls_server
    def step_now(self, action: Any) -> Step:
        """One step, one trial. If the server fails, the episode ends, and ServerLost is raised unless it restarts."""
        if not self._may_step:
            self._refuse_step()
        number = self._begin_step(action)
        watchdog = self._watchdog
        watchdog.call = number
        try:
            result: Any = self.server.step(action)
            watchdog.call = 0
        except BaseException as error:  # noqa: BLE001  a user's server may raise anything
            watchdog.call = 0
            return self._handle_error(number, action, error)
        return self._finish_step(number, action, result)

    def _refuse_step(self) -> NoReturn:
        if self.book.stopping:
            raise RunStopped
        raise InvalidAction(_CLOSED if self._closed else "the episode is over: call reset() first")

    def _begin_step(self, action: Any) -> int:
        number = self.book.increment_step()
        if not self._in_episode:
            self._begin_episode(number)
        if self._observers:
            self._observers.notify("before", self._trial(number, action))
        return number

    def _finish_step(self, number: int, action: Any, result: Any) -> Step:
        """Check the server's response to a step, record it, and return it as gymnasium does."""
        try:
            observation, reward, terminated, truncated, info = result
            # The exact types are the usual case; anything else takes a slower path.
            if type(reward) is not float:
                reward = read_reward(reward)
            if type(terminated) is not bool:
                terminated = read_flag("terminated", terminated)
            if type(truncated) is not bool:
                truncated = read_flag("truncated", truncated)
            if problem := self._check(observation):
                raise ServerError(problem)
            if not math.isfinite(reward):
                raise ServerError(f"reward: expected a finite number, got {reward}")
            info["trial"] = number
        except (TypeError, ValueError) as error:
            return self._fail(number, action, Outcome.METRIC_MISSING, step_problem(result, error))
        self._observation = observation
        self._last = number
        self._length += 1
        self._return += reward
        if reward < self._worst:
            self._worst = reward
        if not self._records_episodes:
            # Copies, since they are written later and their owners may reuse the arrays for the next step.
            obs = observation.copy() if self._shows_array else self._copy(observation)
            action_copy = action if self._action_is_immutable else deepcopy(action)
            self._add(
                (number, self._episode.group, action_copy, self._draw, self._regime_json, obs, reward, time.time())
            )
            if not number & 4095:
                self._recorder.keep_up()  # an episode may never end
        else:
            # One object, so that the recorder's thread never combines values of two steps.
            self._progress = self._episode, number, self._length, self._return
        if self._observers:
            self._observers.notify(
                "after", replace(self._trial(number, action), outcome=Outcome.OK, reward=Reward(reward))
            )
        if terminated or truncated:
            self._end_episode(truncated=truncated, complete=True)
        elif number == self.book.budget:
            truncated = True
            self._end_episode(truncated=True, complete=False)
        if self._regime:
            info["env_params"] = dict(self._regime)
        return observation, reward, terminated, truncated, info

    def _handle_error(self, number: int, action: Any, error: BaseException) -> Step:
        """The server raised: the action is invalid, the response is unusable, or the server is lost."""
        if isinstance(error, Hung):
            error = ServerLost(self._watchdog.reason("step"))
        elif not isinstance(error, Exception | SystemExit):
            if isinstance(error, RunStopped):
                self._record_failure(number, action, Outcome.ABORTED, "the run was stopped")
            raise error
        if isinstance(error, ServerError):
            return self._fail(number, action, Outcome.METRIC_MISSING, str(error))
        try:
            is_valid = not isinstance(error, InvalidAction) and self.server.action_space.contains(action)
        except (TypeError, ValueError, AttributeError):
            is_valid = False
        if not is_valid:
            return self._fail(number, action, Outcome.INVALID, str(error) or repr(error))
        reason = str(error) if isinstance(error, ServerLost) else f"the server failed: {type(error).__name__}: {error}"
        if isinstance(error, ServerLost) and error.restarts:
            return self._fail(number, action, error.outcome, reason)
        self._record_failure(number, action, Outcome.LOST, reason)
        self._recorder.flush()
        if isinstance(error, ServerLost):
            raise error
        raise ServerLost(reason) from error

    def _fail(self, number: int, action: Any, outcome: Outcome, reason: str) -> Step:
        """Record a failed trial, which ends its episode, and return its penalty as the reward."""
        self._record_failure(number, action, outcome, reason)
        penalty = self.penalties.for_outcome(outcome)
        reward = failure_reward(self._worst) if penalty is None else penalty
        info = {"trial": number, "outcome": str(outcome), "error": reason, **self._env_params()}
        return self._copy(self._observation), reward, False, True, info

    def _record_failure(self, number: int, action: Any, outcome: Outcome, reason: str) -> None:
        self._last = number
        self._length += 1
        fault, now = FAULT_OF[outcome], time.time()
        ending = outcome, fault, reason
        if not self._records_episodes:
            trial = (number, self._episode.group, as_json(action).decode(), self._draw, self._regime_json)
            self._recorder.add_row((*trial, *ending, None, None, "{}", now, now))
        if self._observers:
            self._observers.notify(
                "after", replace(self._trial(number, action), outcome=outcome, fault=fault, reason=reason)
            )
        self._end_episode(truncated=True, complete=False, ending=ending)
        self._failures.add(number, outcome, reason, len(self.slots))

    def _trial(self, number: int, action: Any) -> Trial:
        value = action.tolist() if hasattr(action, "tolist") else action
        return Trial(number, {"action": value}, "", self._episode.group, draw=self._draw, regime=self._regime)

    def step_slots(self, actions: Sequence[Any]) -> list[Step]:
        """One step of every slot, in their order; in one call, if their servers share a process."""
        step_copies = getattr(self.server, "step_copies", None)
        if step_copies is None or len(self.slots) == 1:
            steps = [slot.step_now(action) for slot, action in zip(self.slots, actions, strict=True)]
        else:
            for slot in self.slots:
                if not slot._may_step:
                    slot._refuse_step()  # before any of them gets a number
            numbers = [slot._begin_step(action) for slot, action in zip(self.slots, actions, strict=True)]
            steps = []
            for slot, number, action, result in zip(
                self.slots, numbers, actions, self._watchdog.guard("step", lambda: step_copies(actions)), strict=True
            ):
                finish = slot._handle_error if isinstance(result, BaseException) else slot._finish_step
                steps.append(finish(number, action, result))
        self._log.release()
        return steps

    # -- flush and close ----------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write every step to the ledger: before a checkpoint, and at the end."""
        self._recorder.flush()

    def close(self) -> None:
        """Truncate the episodes in progress, write everything, close the servers. May be called again."""
        if self._closed:
            return
        self.book.when_stopped(None)
        try:
            for slot in self.slots:
                slot._closed, slot._may_step = True, False
                if slot._in_episode:
                    slot._end_episode(truncated=True, complete=False)
            self._log.close()
            self.book.doubt = self._failures.doubt
        finally:
            for slot in self.slots:
                slot._close_server()

    def _close_server(self) -> None:
        try:
            self._watchdog.guard("close", self.server.close)
        except (Exception, SystemExit) as error:  # noqa: BLE001  must not hide an earlier error
            reason = error if isinstance(error, ServerLost) else f"the server failed in 'close': {error!r}"
            log.warning("%s; continuing without closing it", reason)
        finally:
            self._watchdog.close()

    def _stop(self) -> bool:
        """Allow no further step. Called by a signal handler, so that a step need not check for a stop."""
        for slot in self.slots:
            slot._may_step = False
        return False
