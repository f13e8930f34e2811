"""The rollout environment: runs tasks through an agent loop, judges the episodes, and records them in the ledger."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from loopwright.core.config import overridden
from loopwright.core.episode import Attempt, Episode
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.trial import Action, JudgedReward, Objectives, Result, Trial, key_of
from loopwright.engines.base import EngineConfig, Sampling
from loopwright.ledger.groups import Groups
from loopwright.ledger.rollouts import EVALUATED, REPEAT
from loopwright.ledger.trial_book import TrialBook
from loopwright.rollouts.evaluation import EvalConfig
from loopwright.rollouts.group import Group, GroupJudging
from loopwright.rollouts.judgers import JudgerClient, JudgerDown
from loopwright.rollouts.judgers.base import JudgeFailed
from loopwright.rollouts.loops.worker import RolloutRequest, WeightUpdate
from loopwright.rollouts.pools.base import EventLoopBlocked, Pool, PoolDown, SerializationError, WorkerLost
from loopwright.rollouts.produce_config import ProduceConfig
from loopwright.rollouts.tasks.mix import Prompt, TaskMix

log = logging.getLogger(__name__)
_GRACE_S = 10.0
_MAX_JUDGER_WAITS = 3
"""How often a rollout waits for a judger that is down, unless `wait_for_judger` is set."""
_QUIET_S = 60.0
"""For so long after a rollout began to wait for its judger, others do so without a warning."""
_EVALUATION_INDEX = (
    f"CREATE INDEX IF NOT EXISTS trials_examined ON trials ({EVALUATED}, grp) WHERE {EVALUATED} IS NOT NULL"
)


@dataclass(frozen=True, slots=True)
class PolicySource:
    """The engine that samples for a run, as far as a trainer must know it."""

    engine: EngineConfig
    sampling: Sampling
    scenario_dir: Path
    """The directory that paths are relative to."""
    in_process: bool
    """Whether the engine is in this process, so that weights can be handed over in memory."""


@dataclass(frozen=True, slots=True)
class SourceRunner:
    """What runs and judges the rollouts of one source of tasks."""

    judger: JudgerClient
    slots: asyncio.Semaphore
    """Limits how many are in flight; sources with the same workers share them."""
    concurrency: int
    """How many slots there are."""
    deadline_s: float
    """Seconds after which a rollout is given up."""
    loop: str = ""
    """The name of its loop in the pool."""
    sampling: Sampling | None = None
    """What differs from the loop's sampling."""
    produce: ProduceConfig | None = None
    """What differs from the run's way to produce groups."""
    key: str = ""
    """Changes with every setting that makes its rollouts incomparable; part of the keys of its trials."""


class RolloutEnv:
    """Runs a task through an agent loop, judges the episode and records it.

        async with env.running():
            group = env.open_group(prompt, size=8)
            await env.roll_all([group])

    What the policy did or caused is scored. Other failures are attempted once more, and then have no reward.
    """

    metric_names = ("tokens", "turns")
    objectives = Objectives((JudgedReward(),))

    def __init__(
        self,
        book: TrialBook,
        *,
        tasks: TaskMix,
        loop: Pool,
        judger: JudgerClient,
        produce: ProduceConfig | None = None,
        seed: int = 0,
        concurrency: int = 64,
        deadline_s: float = 600.0,
        source: PolicySource | None = None,
        evaluation: EvalConfig | None = None,
        sources: Mapping[str, SourceRunner] | None = None,
        cluster: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        """`judger`, `concurrency` and `deadline_s` are for the sources that are not in `sources`."""
        self.book, self.tasks, self.loop, self.buffer = book, tasks, loop, Groups(book.ledger)
        self.produce = produce or ProduceConfig()
        self.source, self.evaluation = source, evaluation
        self._runners = sources or {}
        self._default_runner = SourceRunner(judger, asyncio.Semaphore(concurrency), concurrency, deadline_s)
        slots = {id(runner.slots): runner.concurrency for runner in self._runners.values()}
        self.concurrency = sum(slots.values()) or concurrency
        """How many rollouts are in flight at a time."""
        judgers = [judger, *(runner.judger for runner in self._runners.values())]
        self._judgers = list({id(judger): judger for judger in judgers}.values())
        self.wait_for_judger = False
        """Whether rollouts wait for a judger that is down until it is back, instead of failing after a while."""
        self._seed, self._cluster = seed, cluster
        self._warned_timeout = self._warned_task = False
        self._quiet_until_s = 0.0
        """Until then, a judger that is down has been warned about."""
        ((evaluations,),) = book.ledger.transaction.rows(f"SELECT count({EVALUATED}) FROM trials")
        book.uncounted += evaluations  # the budget is for training

    @asynccontextmanager
    async def running(self) -> AsyncIterator["RolloutEnv"]:
        """Start the judger and the loop's workers, and stop them at the end."""
        async with self._cluster():
            try:
                for judger in self._judgers:
                    await judger.start()
                await self.loop.start()
                yield self
            finally:
                await self.loop.close()
                for judger in self._judgers:
                    await judger.close()

    async def publish(self, update: WeightUpdate) -> None:
        """Send a weight update to the engines that sample for this run, or to their gateway."""
        await self.loop.publish(update)

    def runner(self, source: str) -> SourceRunner:
        """What runs and judges the rollouts of a source."""
        return self._runners.get(source, self._default_runner)

    # -- groups -------------------------------------------------------------------------------------------------

    def open_group(self, prompt: Prompt, size: int, *, again: int | None = None, hold: bool = False) -> Group:
        """Start a group. Its trials are numbered and, unless they are on `hold`, in the ledger when this returns.

        `again` is the number of an expired group whose prompt is attempted again.
        """
        self.book.group = number = self.book.group + 1
        trials = [self._new_trial(prompt.action, number, repeat) for repeat in range(size)]
        self.buffer.open(number, prompt.source, trials, again=again, hold=hold)
        return self._group(number, prompt, size, trials)

    def load_group(self, number: int, size: int) -> Group:
        """A group as recorded in the ledger."""
        trials = self.book.ledger.group(number)
        return self._group(number, self.tasks.find(trials[0].action), size, trials)

    def refill(self, group: Group) -> list[Trial]:
        """Add trials for those that a group has lost, up to a limit, and return them."""
        trials: list[Trial] = []
        unlimited = "evaluated" in group.action
        while group.missing and group.trials < group.max_trials and (unlimited or self.book.has_budget()):
            if self.book.stopping:
                return trials
            trial = self._new_trial(group.action, group.number, group.trials)
            self.book.ledger.reserve([trial])
            group.trials += 1
            group.in_flight[trial.number] = trial
            trials.append(trial)
        if group.judging is not None:
            group.judging.judge_if_complete()  # stop waiting for what was lost
        return trials

    def open_evaluation(self, step: int, samples: int, repeat: int = 0) -> list[Group]:
        """The groups of the evaluation after this step, including what an earlier process did of it.

        `repeat` is how often it was repeated because it was unreliable.
        """
        ledger = self.book.ledger
        with ledger.transaction as connection:
            connection.execute(_EVALUATION_INDEX)  # not for every run: most have no evaluation
        query = f"SELECT DISTINCT grp FROM trials WHERE {EVALUATED} = ? AND {REPEAT} = ?"
        rows = ledger.transaction.rows(query, (step, repeat))
        trials_by_prompt: dict[tuple[str, int], list[Trial]] = {}
        for (number,) in rows:
            trials = ledger.group(number)
            trials_by_prompt[trials[0].action["source"], trials[0].action["index"]] = trials
        groups = []
        for prompt in self.tasks.held_out():
            if earlier := trials_by_prompt.get((prompt.source, prompt.index)):
                groups.append(self._group(earlier[0].group, prompt, samples, earlier))
            else:
                groups.append(self.open_evaluation_group(prompt, step, samples, repeat))
        ledger.flush()
        return groups

    def open_evaluation_group(self, prompt: Prompt, step: int, samples: int, repeat: int = 0) -> Group:
        """A group of an evaluation: it is never trained on."""
        self.book.group = number = self.book.group + 1
        action = {**prompt.action, "evaluated": step, **({"repeat": repeat} if repeat else {})}
        trials = [self._new_trial(action, number, repeat) for repeat in range(samples)]
        self.book.ledger.reserve(trials, hold=True)
        return self._group(number, prompt, samples, trials)

    def _group(self, number: int, prompt: Prompt, size: int, trials: Sequence[Trial]) -> Group:
        group = Group(number, prompt, size, trials=len(trials), action=trials[0].action)
        judger = self.runner(prompt.source).judger
        group.judging = GroupJudging(judger, group) if judger.compares else None
        for trial in trials:
            if trial.unfinished:
                group.in_flight[trial.number] = trial
            elif (data := self.book.ledger.payload(trial.number, "rollout")) is not None:
                group.add(trial.number, Episode.from_bytes(data))
        return group

    def _new_trial(self, action: Action, group: int, repeat: int) -> Trial:
        self.book.uncounted += "evaluated" in action
        settings = self.runner(action["source"]).key
        key = key_of(settings, action, repeat) if settings else ""
        return self.book.new_trial(action, group=group, repeat=repeat, key=key)

    # -- one rollout --------------------------------------------------------------------------------------------

    async def roll_all(self, groups: Sequence[Group]) -> None:
        """Finish these groups, including replacements for lost trials. If a rollout raises, all are cancelled."""

        async def roll(group: Group, trial: Trial) -> None:
            await self.roll(group, trial)
            for replacement in self.refill(group):
                tasks.create_task(roll(group, replacement))

        try:
            async with asyncio.TaskGroup() as tasks:
                for group in groups:
                    for trial in [*group.in_flight.values(), *self.refill(group)]:
                        tasks.create_task(roll(group, trial))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self.book.ledger.flush()

    async def roll(self, group: Group, trial: Trial) -> Episode:
        """Run a trial of a group and record it; its episode is then in the group, if it counts."""
        self.book.observers.notify("before", trial)
        try:
            episode, data = await self._episode(trial, group.judging)
        except asyncio.CancelledError:
            self.book.commit(trial, Result(Outcome.ABORTED, reason="the run was stopped"))
            raise
        self.book.commit(trial, _result(episode, data))
        del group.in_flight[trial.number]
        group.add(trial.number, episode)
        return episode

    async def _episode(self, trial: Trial, judging: GroupJudging | None) -> tuple[Episode, bytes]:
        """The judged episode of a trial, and its bytes for the ledger."""
        task, clock = self.tasks.find(trial.action).task, asyncio.get_running_loop().time
        earlier: tuple[Attempt, ...] = ()
        is_evaluation = "evaluated" in trial.action
        runner = self.runner(trial.action["source"])
        sampling = runner.sampling
        if is_evaluation and self.evaluation is not None and self.evaluation.sampling is not None:
            sampling = overridden(self.evaluation.sampling, sampling)
        queued_s = clock()
        async with runner.slots:
            while True:
                started_s, started_at = clock(), time.time()
                seed = f"{self._seed}:{trial.number}:{len(earlier)}"
                request = RolloutRequest(task, seed, sampling, trial.number, runner.loop)
                episode = await self._attempt(request, runner.deadline_s)
                phases = {"queue": started_s - queued_s, "loop": clock() - started_s}
                if episode.attempts:
                    phases |= episode.attempts[-1].phases_s
                if episode.fault in (None, Fault.POLICY) or earlier:
                    break
                # What the policy did not cause is attempted once more, on another worker if there is one.
                earlier = (Attempt(started_at, phases, episode.outcome, episode.reason),)
                queued_s = clock()
        if episode.fault in (None, Fault.POLICY):
            started_s = clock()
            episode = await self._judge(trial, episode, runner.judger if judging is None else judging)
            phases["judge"] = clock() - started_s
        attempts = (*earlier, Attempt(started_at, phases, episode.outcome, episode.reason))
        episode = replace(episode, group=trial.group, attempts=attempts)
        if is_evaluation:  # a policy that is trained on it could no longer be measured by it
            episode = replace(episode, trainable=False, in_baseline=False)
        try:
            return episode, episode.to_bytes()
        except TypeError as error:  # a user's loop may put anything into its episode
            reason = f"the episode cannot be serialized: {error}"
            attempts = (*earlier, Attempt(started_at, {}, Outcome.CRASHED, reason))
            episode = Episode(task, group=trial.group, attempts=attempts)
            episode = episode.failed(Outcome.CRASHED, Fault.WORKLOAD, reason)
            return episode, episode.to_bytes()

    async def _attempt(self, request: RolloutRequest, deadline_s: float) -> Episode:
        try:
            episode: Episode = await self.loop.call(request, timeout_s=deadline_s + _GRACE_S)
        except PoolDown:
            raise  # every further rollout would be lost as well
        except SerializationError as error:
            return Episode(request.task).failed(Outcome.CRASHED, Fault.WORKLOAD, str(error))
        except WorkerLost as error:
            return Episode(request.task).failed(Outcome.LOST, Fault.INFRA, str(error))
        except EventLoopBlocked as error:
            episode = Episode(request.task).failed(Outcome.TIMEOUT, Fault.WORKLOAD, str(error))
        except TimeoutError:
            reason = f"the loop did not return within {_GRACE_S:g} s after its last deadline of {deadline_s:g} s"
            episode = Episode(request.task).failed(Outcome.TIMEOUT, Fault.WORKLOAD, reason)
        if episode.outcome is Outcome.TIMEOUT and not self._warned_timeout:
            self._warned_timeout = True
            log.warning("trial %s: %s; the report counts further ones", request.trial, episode.reason)
        if episode.task != request.task:
            if not self._warned_task:
                self._warned_task = True
                log.warning("trial %s: its loop changes the task; judgers see the original one", request.trial)
            episode = replace(episode, task=request.task)
        return episode

    async def _judge(self, trial: Trial, episode: Episode, judge: JudgerClient | GroupJudging) -> Episode:
        for waits in count():
            try:
                return episode.judged(await judge.judge(episode))
            except JudgerDown as error:
                if self.wait_for_judger or waits < _MAX_JUDGER_WAITS:
                    # Waiting for the judger costs less than another rollout.
                    if waits >= _MAX_JUDGER_WAITS:
                        now_s = asyncio.get_running_loop().time()
                        if now_s >= self._quiet_until_s:
                            log.warning("trial %d waits until its judger is back: %s", trial.number, error)
                        self._quiet_until_s = now_s + _QUIET_S
                    await asyncio.sleep(error.retry_in_s)
                    continue
                reason = str(error)
            except JudgeFailed as error:
                reason = str(error)
            break
        return episode.failed(Outcome.JUDGE_FAILED, Fault.JUDGE, reason)


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
