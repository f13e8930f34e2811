"""The base of all environments: it alone does reserve → run → commit, with many trials in flight."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from math import fsum
from typing import Any

from loopwright.core.canonical import key_of
from loopwright.core.errors import InvalidAction
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.reward import Objectives, Reward
from loopwright.core.trial import Action, Feedback, Observation, Proposal, Regime, Result, Trial
from loopwright.ledger.observer import Observer, Observers
from loopwright.ledger.run import Run
from loopwright.ledger.shared_cache import SharedCache
from loopwright.ledger.steps import Kind, Step


@dataclass(frozen=True)
class Penalties:
    """The numbers an agent is told for failed trials; None means it is told *failed*. They are never rewards."""

    metric_failure: float | None = None
    constraint_failure: float | None = None

    def for_outcome(self, outcome: Outcome) -> float | None:
        """The number for one kind of failure."""
        return self.constraint_failure if outcome is Outcome.INFEASIBLE else self.metric_failure


@dataclass(frozen=True)
class Terms:
    """What an environment keeps to, beside measuring: how it scores, repeats, remembers and counts."""

    objectives: Objectives
    penalties: Penalties = Penalties()
    budget: int | None = None
    repeats: int = 1
    cache: str = "run"
    count_cached: bool = True
    exhaustible: bool = True
    """Whether a finite space is used up once all of it was measured; not for an agent that measures again."""
    fingerprint: str = ""


class Env(ABC):
    """An environment: an action in, a trial run and written down, feedback out.

    class Doubling(Env):
        metric_names = ("y",)

        async def measure(self, trial: Trial) -> Result:
            return Result(Outcome.OK, {"y": 2.0 * trial.action["x"]})
    """

    metric_names: tuple[str, ...] = ()

    def __init__(self, run: Run, terms: Terms, observers: Observers, shared: SharedCache | None = None) -> None:
        self.run, self.terms, self._observers, self._shared = run, terms, observers, shared
        self.cached = run.ledger.counts()["cached"]
        self.keys = set() if terms.count_cached else {trial.key for trial in run.ledger.trials() if trial.key}
        # The ledger knows best, but asking it about each new question costs more than remembering which are old.
        self._answered = run.ledger.answered()
        self._flying: dict[str, asyncio.Event] = {}
        self._metrics: Mapping[str, float] = {}
        self._pending: dict[int, Observation] = {}
        self._repeats: Counter[str] | None = None

    # -- what a kind of environment says ------------------------------------------------------------------------

    @abstractmethod
    async def measure(self, trial: Trial) -> Result:
        """Run a trial. A failure is a result; an exception is a bug. Cancellation aborts it."""

    def validate(self, action: Action) -> Action:
        """The action as it will be recorded and run, or InvalidAction."""
        return action

    def question(self, action: Action) -> Any:
        """All of an action that decides what is measured, for the cache key."""
        return action

    def infeasible(self, action: Action, regime: Regime) -> str | None:
        """The constraint that forbids this action, if one does."""
        return None

    def sample(self, draw: int) -> Regime:
        """The regime of a draw; depends on the draw's index alone."""
        return {}

    @property
    def cardinality(self) -> int | None:
        """How many different trials there are, where that is finite."""
        return None

    def open(self) -> None:
        """Get ready to measure."""

    async def close(self) -> None:
        """Let go of everything."""

    def kill(self) -> None:
        """End all that runs, at once; called from a signal handler."""

    # -- the spine ----------------------------------------------------------------------------------------------

    def reset(self, slot: int = 0) -> Observation:
        """An episode boundary, never a trial boundary: the observation that waits to be acted on, draw included.

        Each slot of a vectorised environment has one of its own.
        """
        if slot not in self._pending:
            draw = 1 + max(self.run.draw, *(waiting.draw or 0 for waiting in self._pending.values()), 0)
            regime = self.sample(draw)
            metrics = {name: self._metrics.get(name) for name in self.metric_names}
            self._pending[slot] = Observation(metrics, regime, draw if regime else None)
        return self._pending[slot]

    def step(
        self,
        action: Action,
        note: Mapping[str, Any] | None = None,
        *,
        fresh: bool = False,
        slot: int = 0,
        under: Regime | None = None,
    ) -> Awaitable[Feedback]:
        """Run a trial, or a group of repeats. The reservation is made in this call, before anything is awaited.

        With `fresh` the question is measured again even if its answer is known; `under` sets the regime instead of the
        draw that waits, for evaluations.
        """
        if under is None:
            seen = self.reset(slot)
            del self._pending[slot]
        else:
            seen = Observation(dict.fromkeys(self.metric_names), under)
        if seen.draw is not None:
            self.run.draw = max(self.run.draw, seen.draw)
        self.run.group += 1
        try:
            action, invalid = self.validate(action), None
        except InvalidAction as error:
            invalid = Result(Outcome.INVALID, reason=str(error))
        question = None if invalid else self.question(action)
        first = self._repeats_so_far(action, seen.context) if fresh and not invalid else 0
        trials = [
            Trial(
                number=self.run.increment_step(),
                action=action,
                key="" if invalid else key_of(question, seen.context, self.terms.fingerprint, repeat),
                group=self.run.group,
                repeat=repeat,
                draw=seen.draw,
                regime=seen.context,
                reserved_at=time.time(),
            )
            for repeat in range(first, first + (1 if invalid else self.terms.repeats))
        ]
        self.run.ledger.reserve(trials, note, hold=True)
        return self.finish(trials, seen, invalid, slot)

    def _repeats_so_far(self, action: Action, regime: Regime) -> int:
        if self._repeats is None:
            self._repeats = Counter(key_of(trial.action, trial.regime) for trial in self.run.ledger.trials())
        question = key_of(action, regime)
        self._repeats[question] += self.terms.repeats
        return self._repeats[question] - self.terms.repeats

    async def finish(
        self, trials: Sequence[Trial], seen: Observation, invalid: Result | None = None, slot: int = 0
    ) -> Feedback:
        """Run what is unfinished of a group, one repeat after another."""
        ended = [await self._run(trial, invalid) if trial.unfinished else trial for trial in trials]
        return self._feedback(ended, seen, slot)

    async def _run(self, trial: Trial, known: Result | None) -> Trial:
        self._observers.before(trial)
        try:
            result = known or await self._result(trial)
        except asyncio.CancelledError:
            self._end(trial, Result(Outcome.ABORTED, reason="the run was stopped"))
            raise
        return self._end(trial, result)

    async def _result(self, trial: Trial) -> Result:
        if self.terms.cache == "off":
            return self._forbidden(trial) or await self.measure(trial)
        return await self._answer(trial) or await self._lead(trial)

    async def _answer(self, trial: Trial) -> Result | None:
        """What is known without running: from the cache, from an equal trial in flight, or from the constraints."""
        while trial.key in self._flying:
            # That may take long: what is held back must not wait as well.
            self.run.ledger.flush()
            await self._flying[trial.key].wait()
        if trial.key in self._answered and (found := self.run.ledger.find(trial.key)):
            self.cached += 1
            return Result(found.outcome or Outcome.OK, found.metrics, found.reason, cached_from=str(found.number))
        if forbidden := self._forbidden(trial):
            return forbidden
        if self._shared and (shared := self._shared.find(trial.key)):
            self.cached += 1
            return Result(Outcome.OK, shared[1], cached_from=shared[0])
        return None

    def _forbidden(self, trial: Trial) -> Result | None:
        reason = self.infeasible(trial.action, trial.regime)
        return Result(Outcome.INFEASIBLE, reason=reason) if reason else None

    async def _lead(self, trial: Trial) -> Result:
        """Measure; equal trials wait meanwhile and look into the ledger once this one is written there."""
        landed = self._flying[trial.key] = asyncio.Event()
        try:
            return await self.measure(trial)
        finally:
            self._flying.pop(trial.key, None)
            asyncio.get_running_loop().call_soon(landed.set)

    def _end(self, trial: Trial, result: Result) -> Trial:
        reward = result.reward
        if result.outcome is Outcome.OK and reward is None:
            result, reward = self._score(result)
        # On disk before other runs see it, or a resumed run would find its own trial in the shared cache.
        ended = self.run.ledger.commit(trial, result, reward, hold=self._shared is None)
        if self._shared and ended.outcome is Outcome.OK and ended.cached_from is None:
            self._shared.put(ended.key, f"{self.run.directory.absolute()}#{ended.number}", ended.metrics)
        if not self.terms.count_cached and ended.key:
            self.keys.add(ended.key)
        if result.outcome.reusable:
            self._answered.add(ended.key)
        self._metrics = ended.metrics
        self._observers.after(ended)
        return ended

    def _score(self, result: Result) -> tuple[Result, Reward | None]:
        try:
            return result, self.terms.objectives.score(result.metrics)
        except (ArithmeticError, ValueError, TypeError, KeyError) as error:
            reason = f"the metrics {dict(result.metrics)} have no reward: {error}"
            return replace(result, outcome=Outcome.METRIC_MISSING, reason=reason, fault=Fault.WORKLOAD), None

    # -- what the agent is told ---------------------------------------------------------------------------------

    def _feedback(self, trials: Sequence[Trial], seen: Observation, slot: int = 0) -> Feedback:
        first = next((trial for trial in trials if trial.outcome is not Outcome.OK), trials[0])
        reward = mean_reward([trial.reward for trial in trials])
        outcome = first.outcome or Outcome.ABORTED
        told = reward.objectives if reward else None
        penalty = self.terms.penalties.for_outcome(outcome)
        if told is None and penalty is not None:
            told = (penalty,) * len(self.terms.objectives.functions)
        now = replace(self.reset(slot), metrics={name: first.metrics.get(name) for name in self.metric_names})
        return Feedback(
            trial=trials[0].number,
            action=first.action,
            reward=reward,
            told=told,
            observation=now,
            previous=seen,
            regime=first.regime,
            outcome=outcome,
            fault=first.fault,
            done=not self.may_propose,
            group=first.group,
        )

    def watch(self, observers: Sequence[Observer]) -> None:
        """Add observers to those that the run has already."""
        self._observers = Observers([*self._observers, *observers])

    def stepped(self, kind: Kind, step: Step) -> None:
        """Tell the observers what a step of training came to."""
        self._observers.after_step(kind, step)

    # -- budget and resume --------------------------------------------------------------------------------------

    @property
    def may_propose(self) -> bool:
        """Whether the budget has room for another trial."""
        budget = self.terms.budget
        if self.run.stopping:
            return False
        if self.terms.count_cached:
            return budget is None or self.run.step + self.terms.repeats <= budget
        size = self.cardinality if self.terms.exhaustible else None
        if size is not None and len(self.keys) >= size * self.terms.repeats:
            return False
        return budget is None or (self.run.step - self.cached < budget and self.run.group < 10 * budget)

    def history(self) -> Iterator[Proposal]:
        """Everything proposed so far in this run, by group, for an agent that goes on from there."""
        notes = self.run.ledger.notes()
        for _, group in groupby(self.run.ledger.trials(), key=lambda trial: trial.group):
            trials = list(group)
            finished = not any(trial.unfinished for trial in trials)
            seen = self._seen(trials[0])
            feedback = self._feedback(trials, seen) if finished else None
            first = trials[0]
            yield Proposal(first.group, first.action, first.regime, notes.get(first.number), feedback)

    def unfinished(self) -> list[list[Trial]]:
        """The groups that were in flight when the run stopped, to be finished under their own numbers and draws."""
        groups = sorted({trial.group for trial in self.run.ledger.unfinished()})
        return [self.run.ledger.group(number) for number in groups]

    def resume(self, trials: Sequence[Trial]) -> Awaitable[Feedback]:
        """Finish a group that an earlier process began."""
        return self.finish(trials, self._seen(trials[0]))

    def _seen(self, trial: Trial) -> Observation:
        return Observation(dict.fromkeys(self.metric_names), trial.regime, trial.draw)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Env"]:
        """The environment, open, inside the event loop of its run."""
        self.open()
        try:
            yield self
        finally:
            await self.close()


def mean_reward(rewards: Sequence[Reward | None]) -> Reward | None:
    """The mean over a group's repeats; None if any has none, since the mean of the survivors would be a lie."""
    known = [reward for reward in rewards if reward is not None]
    if len(known) < len(rewards) or not known:
        return None
    if len(known) == 1:
        return known[0]
    size = len(known)
    objectives = [fsum(values) / size for values in zip(*(reward.objectives for reward in known), strict=True)]
    parts = {name: fsum(reward.parts.get(name, 0.0) for reward in known) / size for name in known[0].parts}
    return Reward(objectives[0], parts, tuple(objectives[1:]))
