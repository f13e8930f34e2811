"""The search environment: an action over a workload's parameters in, a recorded trial and feedback out.

A step proposes a trial, looks for its answer in the cache and the constraints, otherwise runs the workload, turns the
metrics into a reward, and commits. Many trials may be in flight.
"""

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from math import prod
from typing import Any, Self

import orjson

from loopwright.core.errors import InvalidAction
from loopwright.core.outcome import REUSABLE, Outcome
from loopwright.core.trial import (
    Action,
    Feedback,
    Objectives,
    Observation,
    Penalties,
    Phase,
    Proposal,
    Regime,
    Result,
    Trial,
    key_of,
    mean_reward,
)
from loopwright.envs.failures import FAILED, FailureWatch
from loopwright.envs.stopping import Curve, FidelityConfig, StopConfig, StopRule, run_levels
from loopwright.ledger.shared_cache import SharedCache
from loopwright.ledger.trial_book import TrialBook
from loopwright.spaces.space import Draws, Noise, Space
from loopwright.workloads.base import Job, Workload


@dataclass(frozen=True)
class TrialRules:
    """How a search environment repeats, caches and penalises trials."""

    penalties: Penalties = field(default_factory=Penalties)
    repeats: int = 1
    cache: str = "run"
    exhaustible: bool = True
    """Whether a finite space is used up once all of it was measured; not for an agent that measures again."""
    stop: StopConfig | None = None
    fidelity: FidelityConfig | None = None
    fidelity_name: str = ""
    """The argument that `fidelity` sets."""
    fingerprint: str = ""
    """Part of every cache key: trials of different inputs do not answer one another."""
    retries: int = 0
    """How often a trial that was lost to the infrastructure is attempted again."""
    reserve: int = 0
    """How many trials of the budget are kept for the confirmation of the best configurations."""
    keep: str = "all"
    """Which directories of trials stay, as the workload's `keep` says."""
    episode_steps: int = 1
    """How many trials an episode has: they share a draw, and each observes the metrics of the one before."""
    same: int | None = None
    """After how many identical failures in a row the run ends; by default 20, and only if nothing has succeeded."""


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))


class SearchEnv:
    """Runs a workload once per trial. Drawn values overlay the arguments and are not validated again."""

    def __init__(
        self,
        book: TrialBook,
        *,
        space: Space,
        workload: Workload,
        draws: Draws,
        objectives: Objectives,
        metric_names: tuple[str, ...],
        rules: TrialRules | None = None,
        shared: SharedCache | None = None,
        noise: Noise | None = None,
    ) -> None:
        self.book, self.space, self.workload, self.draws = book, space, workload, draws
        self.noise = noise or Noise(0, {})
        self.objectives, self.metric_names, self.rules = objectives, metric_names, rules or TrialRules()
        self._shared = shared
        book.kill = workload.kill
        self._keys = set() if book.count_cached else book.ledger.keys()
        self._answered: set[int] | None = None if book.step else set()
        """The hashes of the keys with an answer, read when the first is looked up.

        Remembering them is cheaper than asking the ledger about every new one.
        """
        self._in_flight: dict[str, asyncio.Event | None] = {}
        """By key: what equal trials wait for, if there are any."""
        self._trials_directory = book.directory / "trials"
        self._metrics: Mapping[str, float] = {}
        self._best: dict[int, tuple[float, ...]] | None = None
        self._pending: dict[int, Observation] = {}
        self._repeats: Counter[str] | None = None
        self._extra = sum(1 for _ in book.ledger.trials(where="phase <> ''")) if book.step else 0
        """How many trials the agent did not propose."""
        self._failures: FailureWatch | None = None
        self.halted = ""
        """Why the run ends early, because its trials fail alike."""
        self._marker = book.ledger.state("id")
        self._opened_at = time.time()
        self._adoptable = book.ledger.open_attempts() if book.step else {}
        stop = self.rules.stop
        self._stop_rule = None if stop is None else StopRule(stop, self.rules.fidelity, book.ledger)

    # -- one step -----------------------------------------------------------------------------------------------

    def reset(self, slot: int = 0) -> Observation:
        """The first observation of an episode, with its draw. Marks an episode boundary, never a trial boundary.

        Each slot of a vectorised environment has its own observation.
        """
        pending = self._pending.get(slot)
        if pending is None or pending.step:
            draw: int | None = None
            regime: Regime = {}
            if self.draws.values:
                draw = 1 + max(self.book.draw, *(pending.draw or 0 for pending in self._pending.values()), 0)
                regime = self.draws.sample(draw)
            # An episode of several trials starts without metrics: those of another regime would mislead.
            last = self._metrics if self.rules.episode_steps == 1 else {}
            metrics = {name: last.get(name) for name in self.metric_names}
            pending = self._pending[slot] = Observation(metrics, regime, draw)
        return pending

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

        With `fresh` the action is measured again even if the cache has its answer; `under` sets the regime instead of
        the pending draw, for evaluations.
        """
        if under is None:
            previous = self._pending.get(slot) or self.reset(slot)
            del self._pending[slot]
        else:
            previous = Observation(dict.fromkeys(self.metric_names), under)
        regime, book, rules = previous.context, self.book, self.rules
        if previous.draw is not None:
            book.draw = max(book.draw, previous.draw)
        book.group = group = book.group + 1
        first = 0
        question: tuple[Any, ...] = ()
        try:
            action, invalid = self.space.validate(action), None
            # The cache key is about what is measured: two actions with the same arguments share it.
            question = self.space.arguments(action, {}), regime, rules.fingerprint
            if fresh:
                if self._repeats is None:
                    self._repeats = Counter(key_of(trial.action, trial.regime) for trial in book.ledger.trials())
                first = self._repeats[point := key_of(action, regime)]
                self._repeats[point] += rules.repeats
        except InvalidAction as error:
            invalid = Result(Outcome.INVALID, reason=str(error))
        trials = []
        for repeat in range(first, first + (1 if invalid else rules.repeats)):
            # Repeats share their draws with those of all other proposals; a single measurement has its own.
            noise = self.noise.sample(repeat if rules.repeats > 1 else group - 1) if self.noise.values else {}
            trials.append(
                book.new_trial(
                    action,
                    group=group,
                    repeat=repeat,
                    key="" if invalid else key_of(*question, repeat, *([noise] if noise else [])),
                    draw=previous.draw,
                    regime=regime,
                    noise=noise,
                )
            )
        book.ledger.reserve(trials, note, hold=True)
        return self._finish(trials, previous, invalid, slot if under is None else None)

    def measure_again(
        self, action: Action, regime: Regime, noise: Mapping[str, Any], *, group: int, repeat: int, phase: Phase
    ) -> Awaitable[Feedback]:
        """Run an action of an earlier group once more, as a repeat of it that no cache answers and no agent sees."""
        self._extra += 1
        book, question = self.book, self.space.arguments(action, {})
        key = key_of(question, regime, self.rules.fingerprint, repeat, *([noise] if noise else []))
        trial = book.new_trial(action, group=group, repeat=repeat, key=key, regime=regime, noise=noise, phase=phase)
        book.ledger.reserve([trial], hold=True)
        return self._finish([trial], Observation(dict.fromkeys(self.metric_names), regime))

    async def _finish(
        self,
        trials: Sequence[Trial],
        previous: Observation,
        answer: Result | None = None,
        slot: int | None = None,
        finished: Sequence[Trial] = (),
    ) -> Feedback:
        """Run the rest of a group after what is finished, one repeat after another, until one fails.

        `answer` is their result if it is known already, `slot` whose episode it is.
        """
        group = list(finished)
        failed = next((trial for trial in group if trial.outcome in FAILED), None)
        for trial in trials:
            if failed is not None:
                reason = f"not run: trial {failed.number} of its group failed"
                outcome = failed.outcome or Outcome.CRASHED
                answer = Result(outcome, reason=reason, fault=failed.fault, cached_from=str(failed.number))
            group.append(await self._run(trial, answer))
            if failed is None and group[-1].outcome in FAILED:
                failed = group[-1]
        return self._feedback(group, previous, slot)

    async def _run(self, trial: Trial, answer: Result | None) -> Trial:
        """Run a trial and commit it, or commit the answer that is known already."""
        if self.book.observers:
            self.book.observers.notify("before", trial)
        try:
            result = answer or await self._lookup(trial) or await self._measure(trial)
        except asyncio.CancelledError:
            self.book.commit(trial, Result(Outcome.ABORTED, reason="the run was stopped"))
            raise
        if result.outcome is Outcome.OK:
            result = self.objectives.scored(result)
        # On disk before other runs see it, or a resumed run would find its own trial in the shared cache.
        finished = self.book.commit(trial, result, hold=self._shared is None)
        if self._shared and finished.outcome is Outcome.OK and finished.cached_from is None:
            self._shared.put(finished.key, f"{self.book.directory.absolute()}#{finished.number}", finished.metrics)
        if self._failures is not None or finished.outcome is not Outcome.OK:
            self._failures = self._failures or FailureWatch(self.book.ledger, self.rules.same, finished)
            self._failures.add(finished)
            self.halted = self._failures.verdict
        if not self.book.count_cached and finished.key and not finished.phase:
            self._keys.add(finished.key)
        if result.outcome in REUSABLE and self._answered is not None:
            self._answered.add(hash(finished.key))
        self._metrics = finished.metrics
        if self.rules.keep != "all":
            await self._discard(finished)
        return finished

    async def _discard(self, trial: Trial) -> None:
        """Delete the directories that `keep` does not ask for."""
        best = self.rules.keep == "best"
        doomed = [trial.number] if best or trial.outcome in (Outcome.OK, Outcome.STOPPED) else []
        if best and trial.reward is not None:
            if self._best is None:
                earlier = (t for t in self.book.ledger.trials(where="reward IS NOT NULL") if t.number < trial.number)
                self._best = {t.number: t.reward.objectives for t in earlier if t.reward is not None}
            new = trial.reward.objectives
            if not any(_dominates(old, new) for old in self._best.values()):
                doomed = [number for number, old in self._best.items() if _dominates(new, old)]
                self._best = {n: old for n, old in self._best.items() if n not in doomed} | {trial.number: new}
        for number in doomed:
            # Renamed first: a worker that takes an unused directory for its next call does not find this one.
            with suppress(OSError):  # gone already, or not to be removed
                directory = self._trials_directory / str(number)
                directory = directory.rename(self._trials_directory / f".{number}.deleted")
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def _lookup(self, trial: Trial) -> Result | None:
        """The result without running: from the cache, from an equal trial in flight, or from the constraints."""
        caches = self.rules.cache != "off" and not trial.phase
        if caches:
            while trial.key in self._in_flight:
                # That may take long: held writes must not wait as well.
                self.book.ledger.flush()
                committed = self._in_flight[trial.key] = self._in_flight[trial.key] or asyncio.Event()
                await committed.wait()
            if self._answered is None:
                self._answered = self.book.ledger.answered_keys()
            if hash(trial.key) in self._answered and (cached := self.book.ledger.find(trial.key)):
                source = str(cached.number)
                return Result(cached.outcome or Outcome.OK, cached.metrics, cached.reason, cached_from=source)
        if self.space.constraints and (violation := self.space.violated(trial.action, trial.regime)):
            return Result(Outcome.INFEASIBLE, reason=violation)
        if caches and self._shared and (shared := self._shared.find(trial.key)):
            return Result(Outcome.OK, shared[1], cached_from=shared[0])
        return None

    async def _measure(self, trial: Trial) -> Result:
        """Run the workload. Equal trials wait meanwhile, and look into the ledger once this one is committed."""
        ledger = self.book.ledger
        curve: Curve | None = None

        def report(step: int, metrics: Mapping[str, float]) -> bool:
            nonlocal curve
            # A finalist runs to its end: it is measured, not searched.
            curve = curve or Curve(trial.number, None if trial.phase else self._stop_rule)
            return curve.add(step, metrics)

        arguments = self.space.arguments(trial.action, {**trial.regime, **trial.noise})
        record: dict[str, Any] = {"trial": trial.number, "arguments": arguments, "action": trial.action}
        if trial.regime:
            record["env_params"] = trial.regime
        if trial.noise:
            record["noise"] = trial.noise
        job = Job(
            trial=trial.number,
            directory=self._trials_directory / str(trial.number),
            arguments=arguments,
            parameters_json=orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE),
            marker=f"{self._marker}.{trial.number}",
            on_start=partial(ledger.attempt, trial.number),
            on_services=lambda processes: ledger.set_state("services", processes),
            report=report,
            flush_reservation=ledger.flush,
            is_retry=trial.reserved_at < self._opened_at,
            handle=self._adoptable.pop(trial.number, (0, ""))[1],
        )
        caches = self.rules.cache != "off"
        if caches:
            self._in_flight.setdefault(trial.key, None)
        try:
            for retry in range(self.rules.retries + 1):
                if self.rules.fidelity is not None:
                    result = await run_levels(self.workload, job, self.rules.fidelity_name, self.rules.fidelity)
                else:
                    result = await self.workload.run(job)
                if result.outcome is not Outcome.LOST or retry == self.rules.retries:
                    break
                ledger.close_attempts([trial.number], result.reason)
                job, curve = replace(job, is_retry=True, handle=""), None
            return result if curve is None else curve.finish(result)
        finally:
            if caches and (committed := self._in_flight.pop(trial.key, None)) is not None:
                asyncio.get_running_loop().call_soon(committed.set)

    def _feedback(self, trials: Sequence[Trial], previous: Observation, slot: int | None = None) -> Feedback:
        first = next((trial for trial in trials if trial.outcome is not Outcome.OK), trials[0])
        reward = first.reward if len(trials) == 1 else mean_reward([trial.reward for trial in trials])
        outcome = first.outcome or Outcome.ABORTED
        values = (reward.value, *reward.more) if reward else None
        stopped_at = None
        if outcome is Outcome.STOPPED:
            stopped_at = self._stopped_at(first)
        elif values is None and (penalty := self.rules.penalties.for_outcome(outcome)) is not None:
            values = (penalty,) * len(self.objectives.functions)
        metrics = {name: first.metrics.get(name) for name in self.metric_names}
        terminated = slot is None or previous.step + 1 >= self.rules.episode_steps
        if not terminated:
            self._pending[slot or 0] = replace(previous, metrics=metrics, step=previous.step + 1)
        pending = self._pending.get(slot or 0) or self.reset(slot or 0)
        return Feedback(
            trial=trials[0].number,
            action=first.action,
            reward=reward,
            values=values,
            observation=Observation(metrics, pending.context, pending.draw, pending.step),
            previous=previous,
            regime=first.regime,
            outcome=outcome,
            fault=first.fault,
            done=not self.may_propose,
            group=first.group,
            stopped_at=stopped_at,
            phase=first.phase,
            terminated=terminated,
        )

    def _stopped_at(self, trial: Trial) -> tuple[int, float] | None:
        """The last point of a stopped trial's curve, as the sampler learns it."""
        data, stop = self.book.ledger.payload(trial.number, "curve"), self.rules.stop
        if data is None or stop is None:
            return None
        curve = orjson.loads(data)
        values = curve["metrics"].get(stop.metric) or [None]
        return None if values[-1] is None else (curve["steps"][-1], values[-1] * (-1 if stop.mode == "min" else 1))

    # -- budget and resume --------------------------------------------------------------------------------------

    @property
    def may_propose(self) -> bool:
        """Whether the budget has room for another proposal."""
        book, repeats = self.book, self.rules.repeats
        if book.stopping or self.halted:
            return False
        # What the confirmation has used of its reserve is not the agent's.
        reserve = self.rules.reserve - self._extra
        if book.count_cached:
            return book.has_budget(repeats + reserve)
        size = self.cardinality if self.rules.exhaustible else None
        if size is not None and len(self._keys) >= size * repeats:
            return False
        return book.budget is None or (book.has_budget(1 + reserve) and book.group < 10 * book.budget)

    @property
    def cardinality(self) -> int | None:
        """How many different trials there are, where that is finite."""
        size = self.space.size
        sizes = [choice.size for choice in self.draws.values.values()]
        if self.rules.repeats == 1:
            sizes += map(len, self.noise.values.values())
        return None if size is None else size * prod(sizes)

    def history(self, *, without_successes: bool = False) -> Iterator[Proposal]:
        """Everything proposed so far in this run, by group, for an agent that continues it.

        With `without_successes`, groups in which every trial is ok are left out, apart from the last.
        """
        notes = self.book.ledger.notes()
        # A large run has few others, and these are found without reading all of it into memory.
        failed = "SELECT grp FROM trials WHERE ifnull(outcome, '') <> 'ok' AND phase = ''"
        where = f"phase = '' AND (grp = {self.book.group} OR grp IN ({failed}))"
        stored = self.book.ledger.trials(where=where if without_successes else "phase = ''")
        for _, group in groupby(stored, key=lambda trial: trial.group):
            trials = list(group)
            first, finished = trials[0], not any(trial.unfinished for trial in trials)
            feedback = self._feedback(trials, self._previous(first)) if finished else None
            yield Proposal(first.group, first.action, first.regime, notes.get(first.number), feedback)

    def unfinished(self) -> list[list[Trial]]:
        """The groups that were in flight when the run stopped, to be finished under their own numbers and draws."""
        ledger, unfinished = self.book.ledger, self.book.ledger.unfinished()
        # Those whose jobs still run come first: they are already in flight.
        groups = {t.group: t.number not in self._adoptable for t in reversed(unfinished) if not t.phase}
        ordered = sorted(groups, key=lambda number: (groups[number], number))
        proposed = [[trial for trial in ledger.group(number) if not trial.phase] for number in ordered]
        return proposed + [[trial] for trial in unfinished if trial.phase]

    def resume(self, trials: Sequence[Trial]) -> Awaitable[Feedback]:
        """Finish a group that an earlier process began."""
        unfinished = [trial for trial in trials if trial.unfinished]
        finished = [trial for trial in trials if not trial.unfinished]
        return self._finish(unfinished, self._previous(trials[0]), finished=finished)

    def _previous(self, trial: Trial) -> Observation:
        return Observation(dict.fromkeys(self.metric_names), trial.regime, trial.draw)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Close the workload at the end, inside the event loop of the run."""
        try:
            yield self
        finally:
            await self.workload.close()
