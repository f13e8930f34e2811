"""The rollout environment: the action is a task, the answer an episode, judged and in the ledger."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from loopwright.core.episode import Attempt, Episode
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.reward import JudgedReward, Objectives
from loopwright.core.task import Task
from loopwright.core.trial import Action, Result, Trial
from loopwright.engines.base import EngineConfig, Sampling
from loopwright.ledger.rollouts import EVALUATED
from loopwright.ledger.trial_book import TrialBook
from loopwright.rollouts.buffer import Buffer
from loopwright.rollouts.evaluation import EvalConfig
from loopwright.rollouts.group import EpisodeJudge, Group, GroupJudging
from loopwright.rollouts.judgers import JudgerDown
from loopwright.rollouts.judgers.base import JudgeFailed
from loopwright.rollouts.loops.worker import RolloutRequest, WeightUpdate
from loopwright.rollouts.pools.base import Pool, PoolDown, SerializationError, WorkerLost
from loopwright.rollouts.produce import ProduceConfig
from loopwright.rollouts.tasks.mix import Prompt, TaskMix

log = logging.getLogger(__name__)
_GRACE_S = 10.0
_MOST_HOLDS = 3
"""How often a rollout waits for a judger that is down, where nothing is said."""
_MOST_TRIALS = 3
"""How many trials a group may use, as a multiple of its size."""
_EXAMINED = f"CREATE INDEX IF NOT EXISTS trials_examined ON trials ({EVALUATED}, grp) WHERE {EVALUATED} IS NOT NULL"


@dataclass(frozen=True, slots=True)
class PolicySource:
    """Where a run's tokens come from: what a trainer must know of it."""

    engine: EngineConfig
    sampling: Sampling
    home: Path
    """The directory that paths are relative to."""
    near: bool
    """Whether the engine is in this process, so that weights need not go by way of a file."""


class RolloutEnv:
    """Runs a task through an agent loop, judges the episode, records both.

    What the policy did or caused is scored. What it could not cause is tried once more, and otherwise has no reward.
    """

    metric_names = ("tokens", "turns")
    objectives = Objectives((JudgedReward(),))

    def __init__(
        self,
        book: TrialBook,
        *,
        tasks: TaskMix,
        loop: Pool,
        judge: EpisodeJudge,
        buffer: Buffer,
        produce: ProduceConfig,
        seed: int = 0,
        concurrency: int = 64,
        deadline_s: float = 600.0,
        source: PolicySource | None = None,
        evaluation: EvalConfig | None = None,
        cluster: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.book, self.tasks, self.loop, self.judge, self.buffer = book, tasks, loop, judge, buffer
        self.produce, self.concurrency = produce, concurrency
        self.source, self.evaluation = source, evaluation
        self.waits_for_judge = False
        """Whether rollouts wait until a judger that is down is back, instead of being given up some time."""
        self._seed, self._deadline_s, self._cluster = seed, deadline_s, cluster
        self._slots = asyncio.Semaphore(concurrency)
        ((evaluations,),) = book.ledger.transaction.rows(f"SELECT count({EVALUATED}) FROM trials")
        book.uncounted += evaluations  # the budget is for training

    # -- numbering ----------------------------------------------------------------------------------------------

    def begin(self, prompt: Prompt, size: int, *, again: int | None = None) -> Group:
        """Open a group: its trials are numbered and in the ledger when this returns."""
        number = self.book.new_group()
        trials = [self._new_trial(prompt.action, number, repeat) for repeat in range(size)]
        self.buffer.open(number, prompt.source, trials, again=again)
        return self.group(number, prompt, size, trials)

    def group(self, number: int, prompt: Prompt, size: int, trials: Sequence[Trial]) -> Group:
        """A group with these trials, of which some may have ended."""
        group = Group(number, prompt, size, trials=len(trials), action=trials[0].action)
        group.bench = GroupJudging(self.judge, group) if self.judge.compares else None
        for trial in trials:
            if trial.unfinished:
                group.flying[trial.number] = trial
            elif episode := self._stored(trial.number):
                self._keep(group, trial.number, episode)
        return group

    def recorded(self, number: int, size: int) -> Group:
        """A group as the ledger has it."""
        trials = self.book.ledger.group(number)
        return self.group(number, self.tasks.find(trials[0].action), size, trials)

    def _stored(self, number: int) -> Episode | None:
        data = self.book.ledger.payload(number, "rollout")
        return None if data is None else Episode.from_bytes(data)

    def _keep(self, group: Group, number: int, episode: Episode) -> None:
        if episode.fault in (None, Fault.POLICY):
            group.episodes[number] = episode
        else:
            group.lost = episode.reason

    def refilled(self, group: Group) -> list[Trial]:
        """New trials for those that a group has lost; one that always breaks is given up some time."""
        more: list[Trial] = []
        free = "evaluated" in group.action
        while group.missing and group.trials < _MOST_TRIALS * group.size and (free or self.book.has_budget()):
            if self.book.stopping:
                return more
            more.append(self._refill(group))
        if group.bench is not None:
            group.bench.check()  # who waits there waits for those alone that still come
        return more

    def _refill(self, group: Group) -> Trial:
        more = self._new_trial(group.action, group.number, group.trials)
        self.book.reserve([more], hold=False)
        group.trials += 1
        group.flying[more.number] = more
        return more

    def _new_trial(self, action: Action, group: int, repeat: int) -> Trial:
        self.book.uncounted += "evaluated" in action
        return self.book.new_trial(action, group=group, repeat=repeat)

    def examine(self, step: int, samples: int) -> list[Group]:
        """The groups of an evaluation after this step, with what an earlier process has of it."""
        known = self._examined(step)
        groups = []
        for prompt in self.tasks.held_out():
            trials = known.get((prompt.source, prompt.index))
            if trials is None:
                groups.append(self.examined(prompt, step, samples))
            else:
                groups.append(self.group(trials[0].group, prompt, samples, trials))
        self.book.ledger.flush()
        return groups

    def examined(self, prompt: Prompt, step: int, samples: int) -> Group:
        """A group of an evaluation: nothing in it is trained on."""
        number = self.book.new_group()
        action = {**prompt.action, "evaluated": step}
        trials = [self._new_trial(action, number, repeat) for repeat in range(samples)]
        self.book.reserve(trials)
        return self.group(number, prompt, samples, trials)

    def _examined(self, step: int) -> dict[tuple[str, int], list[Trial]]:
        with self.book.ledger.transaction as connection:
            connection.execute(_EXAMINED)  # not for every run: most have no evaluation
        rows = self.book.ledger.transaction.rows(f"SELECT DISTINCT grp FROM trials WHERE {EVALUATED} = ?", (step,))
        groups = [self.book.ledger.group(number) for (number,) in rows]
        return {(trials[0].action["source"], trials[0].action["index"]): trials for trials in groups}

    # -- one rollout --------------------------------------------------------------------------------------------

    async def roll_all(self, groups: Sequence[Group]) -> None:
        """Roll what has not ended of these groups, and what makes up for the lost. If one raises, all are over."""

        async def roll(group: Group, trial: Trial) -> None:
            for more in await self.roll(group, trial):
                tasks.create_task(roll(group, more))

        try:
            async with asyncio.TaskGroup() as tasks:
                for group in groups:
                    for trial in [*group.flying.values(), *self.refilled(group)]:
                        tasks.create_task(roll(group, trial))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self.book.ledger.flush()

    async def roll(self, group: Group, trial: Trial) -> list[Trial]:
        """Run a trial of a group to its end; its episode is then in the group, if it counts.

        Gives the trials that are now to be rolled for what was lost.
        """
        self.book.observers.before(trial)
        try:
            episode, data = await self._episode(trial, group.bench)
        except asyncio.CancelledError:
            self.book.commit(trial, Result(Outcome.ABORTED, reason="the run was stopped"))
            raise
        self.book.commit(trial, _result(episode, data))
        del group.flying[trial.number]
        self._keep(group, trial.number, episode)
        return self.refilled(group)

    async def _episode(self, trial: Trial, bench: GroupJudging | None) -> tuple[Episode, bytes]:
        """The judged episode of a trial, and its bytes for the ledger."""
        task, clock = self.tasks.find(trial.action).task, asyncio.get_running_loop().time
        earlier: tuple[Attempt, ...] = ()
        examined = "evaluated" in trial.action
        sampling = self.evaluation.sampling if examined and self.evaluation is not None else None
        waiting = clock()
        async with self._slots:
            while True:
                begun, at = clock(), time.time()
                seed = f"{self._seed}:{trial.number}:{len(earlier)}"
                episode = await self._attempt(RolloutRequest(task, seed, sampling, trial.number))
                phases = {"queue": begun - waiting, "loop": clock() - begun}
                if episode.attempts:
                    phases |= episode.attempts[-1].phases_s
                if episode.fault in (None, Fault.POLICY) or earlier:
                    break
                # What the policy could not cause gets a second try, elsewhere where there is an elsewhere.
                earlier = (Attempt(at, phases, episode.outcome, episode.reason),)
                waiting = clock()
        if episode.fault in (None, Fault.POLICY):
            begun = clock()
            episode = await self._judged(trial, episode, bench)
            phases["judge"] = clock() - begun
        attempts = (*earlier, Attempt(at, phases, episode.outcome, episode.reason))
        episode = replace(episode, group=trial.group, attempts=attempts)
        if examined:  # whoever trains on it would no longer know how good the policy is
            episode = replace(episode, trainable=False, in_baseline=False)
        try:
            data = episode.to_bytes()
        except TypeError as error:  # a loop of the user's own may put anything into its episode
            episode = _unwritten(task, trial.group, earlier, at, f"its episode cannot be written down: {error}")
            data = episode.to_bytes()
        return episode, data

    async def _attempt(self, request: RolloutRequest) -> Episode:
        try:
            episode: Episode = await self.loop.call(request, timeout_s=self._deadline_s + _GRACE_S)
        except PoolDown:
            raise  # every further rollout would be lost as well
        except SerializationError as error:
            return Episode(request.task).failed(Outcome.CRASHED, Fault.WORKLOAD, str(error))
        except WorkerLost as error:
            return Episode(request.task).failed(Outcome.LOST, Fault.INFRA, str(error))
        except TimeoutError:
            reason = f"the loop was not back {_GRACE_S:g} s after its deadline of {self._deadline_s:g} s"
            return Episode(request.task).failed(Outcome.TIMEOUT, Fault.WORKLOAD, reason)
        return episode

    async def publish(self, update: WeightUpdate) -> None:
        """Send a weight update to what samples for this run: the loops' engines, or their gateway's."""
        await self.loop.publish(update)

    async def _judged(self, trial: Trial, episode: Episode, bench: GroupJudging | None) -> Episode:
        for holds in count():
            try:
                reward = await (self.judge.judge(episode) if bench is None else bench.reward(episode))
                return episode.judged(reward)
            except JudgerDown as error:
                if self.waits_for_judge or holds < _MOST_HOLDS:
                    # The judger rests; rolling out anew would cost more than waiting for it.
                    if holds == _MOST_HOLDS:
                        log.warning("trial %d waits for its judger, however long: %s", trial.number, error)
                    await asyncio.sleep(error.retry_in_s)
                    continue
                reason = str(error)
            except JudgeFailed as error:
                reason = str(error)
            break
        return episode.failed(Outcome.JUDGE_FAILED, Fault.JUDGE, reason)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["RolloutEnv"]:
        """Start the judger and the loop's workers; both stop at the end."""
        with self._cluster():
            try:
                await self.judge.start()
                await self.loop.start()
                yield self
            finally:
                await self.loop.close()
                await self.judge.close()


def _unwritten(task: Task, group: int, earlier: tuple[Attempt, ...], at: float, reason: str) -> Episode:
    """What takes the place of an episode that cannot be stored."""
    attempts = (*earlier, Attempt(at, {}, Outcome.CRASHED, reason))
    return Episode(task, group=group, attempts=attempts).failed(Outcome.CRASHED, Fault.WORKLOAD, reason)


def _result(episode: Episode, data: bytes) -> Result:
    usage: Mapping[str, float] = episode.attempts[-1].phases_s if episode.attempts else {}
    return Result(
        episode.outcome,
        {} if episode.reward is None else {"tokens": float(episode.sampled), "turns": float(episode.turns)},
        episode.reason,
        episode.fault,
        {f"{phase}_s": seconds for phase, seconds in usage.items()},
        reward=episode.reward,
        episode=data,
    )
