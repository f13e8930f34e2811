"""The producer: supplies a trainer with groups of judged rollouts, and loses none of them.

Synchronous production makes a batch on request. Asynchronous production keeps more groups in flight than a batch needs
and hands out those that finish first; the others continue and are in a later batch.
"""

import asyncio
import logging
import math
from typing import Any

from loopwright.core.errors import LoopwrightError
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.trial import Trial
from loopwright.rollouts.config import ProduceConfig
from loopwright.rollouts.env import RolloutEnv
from loopwright.rollouts.group import DiscardedGroups, Group
from loopwright.rollouts.loops.worker import WeightUpdate

log = logging.getLogger(__name__)
_MAX_DISCARDED_FACTOR = 10
"""How many groups may be discarded for a batch, as a multiple of its size."""
_LOSSES = (Outcome.LOST, Outcome.CRASHED, Outcome.TIMEOUT, Outcome.JUDGE_FAILED)
_MAX_LOSS_RATE = 0.9
"""Above this, more budget for replacements would hardly save a group."""


class ProductionFailed(LoopwrightError, RuntimeError):
    """Too many groups in a row failed or were filtered."""


class GroupProducer:
    """Produces the groups of one run. It schedules by the running event loop's clock, which may be simulated."""

    def __init__(self, env: RolloutEnv, config: ProduceConfig, *, group_size: int, min_group: int = 1) -> None:
        self.env, self.config, self.group_size, self.min_group = env, config, group_size, min_group
        self.version = 0
        self.discarded = DiscardedGroups()
        """The groups that were produced for the last batch and are not in it."""
        self._discarded_now = DiscardedGroups()
        self._open: dict[int, Group] = {}
        self._finished: dict[int, Group] = {}
        self._expired: list[Group] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._progress = asyncio.Event()
        self._paused = False
        self._error: BaseException | None = None
        self._max_open = self._batch_size = self._next_version = 0
        self._flush_scheduled = self._warned_short = False
        self._ended = self._lost = 0
        """Rollouts, and those of them that do not count; for the budget to keep for replacements."""

    # -- for the trainer ----------------------------------------------------------------------------------------

    async def batch(self, size: int, step: int) -> list[Group]:
        """The next groups to train on, for this step: `size` of them, or fewer when the budget is exhausted.

        Also fewer once ten times as many were discarded; ProductionFailed if none is ready by then.
        """
        while True:
            if self._error is not None:
                raise self._error
            # The prompts of groups that are too old are attempted again first.
            for number in self.env.buffer.expire(self.version - self.config.max_staleness):
                self._expired.append(self._load(number))
            self._aim(size)
            self._top_up()
            waiting = self.env.buffer.waiting
            if waiting >= size or not self._open or self._give_up(size):
                self._next_version = self.version + 1  # what is opened now is used after the next update
                if not self._is_async:
                    self._max_open = 0
                self._warn_if_short()
                self.discarded, self._discarded_now = self._discarded_now, DiscardedGroups()
                return [self._load(number) for number in self.env.buffer.take(size, step)]
            self._progress.clear()
            await self._progress.wait()

    async def update(self, version: int, weights: Any = None) -> None:
        """Publish new weights. Rollouts in flight continue with them, or start again if `partial` is off."""
        if not self.config.partial:
            await self.pause()
        await self.env.publish(WeightUpdate(version, paused=True, weights=weights))
        await self.env.publish(WeightUpdate(version, weights=weights))
        self.version = version
        self.resume()

    async def pause(self, drain_s: float | None = None) -> int:
        """Stop production. Rollouts get `drain_s` to finish; the others are cancelled and started again on `resume`.

        Nothing is in flight when this returns. Returns how many were cancelled.
        """
        self._paused = True
        drain_s = self.config.drain_s if drain_s is None else drain_s
        if self._tasks and drain_s > 0:
            await asyncio.wait(self._tasks.values(), timeout=drain_s)
        cancelled = list(self._tasks.values())
        for task in cancelled:
            task.cancel()
        await asyncio.gather(*cancelled, return_exceptions=True)
        self._tasks.clear()
        self.env.book.ledger.flush()
        return len(cancelled)

    def resume(self) -> None:
        """Continue production."""
        if not self._paused:
            return
        self._paused = False
        for group in list(self._open.values()):
            for trial in list(group.in_flight.values()):
                self._start(group, trial)
        if self._is_async:
            self._top_up()

    def restore(self, step: int) -> None:
        """Continue from the ledger after this training step: open groups are finished, none is lost."""
        buffer = self.env.buffer
        buffer.restore(step)
        counts = self.env.book.ledger.counts()
        self._ended, self._lost = sum(counts.values()), sum(counts.get(outcome, 0) for outcome in _LOSSES)
        self.env.tasks.restore(buffer.draws())
        self._expired = [self._load(number) for number in buffer.expired()]
        for number in buffer.unfinished():
            group = self._load(number)
            self._open[number] = group
            for trial in list(group.in_flight.values()):
                self._start(group, trial)
            self._continue(group)

    @property
    def in_flight(self) -> int:
        """How many rollouts are running."""
        return sum(not task.done() for task in self._tasks.values())

    # -- production ---------------------------------------------------------------------------------------------

    @property
    def _is_async(self) -> bool:
        return self.config.type == "async"

    def _give_up(self, size: int) -> bool:
        """Whether so many groups were discarded that the batch is what is ready."""
        discarded, ready = self._discarded_now.groups.total(), self.env.buffer.waiting
        if discarded < _MAX_DISCARDED_FACTOR * size:
            return False
        if not ready:
            raise ProductionFailed(
                f"{discarded} groups in a row gave nothing to train on: {self._discarded_now}. "
                "Fix what fails, or choose tasks that are neither too easy nor too hard."
            )
        log.warning("a batch has %d groups instead of %d; of the others, %s", ready, size, self._discarded_now)
        return True

    def _warn_if_short(self) -> None:
        if (short := self._discarded_now.groups["short"]) and not self._warned_short:
            self._warned_short = True
            log.warning(
                "%d groups had fewer than %d judged rollouts (`min_group`) and were replaced; the last failure: %s. "
                "The report counts further ones.",
                short,
                self.min_group,
                self._discarded_now.last_failure,
            )

    def _aim(self, size: int) -> None:
        """Set how many groups to have open: all for this batch, and more if production is asynchronous."""
        self._batch_size, self._next_version = size, self.version
        self._max_open = math.ceil(size * (1 + self.config.over_sample)) if self._is_async else size

    @property
    def _usable(self) -> int:
        """How many groups, open or ready, the next batches can use before one that is opened now is too old."""
        if not self._is_async:
            return self._batch_size
        batches = self.config.max_staleness + 1 - (self._next_version - self.version)
        return self._batch_size * max(0, batches)

    def _top_up(self) -> None:
        """Open groups until there are enough, open or ready."""
        while (
            not self._paused
            and len(self._open) < self._max_open
            and len(self._open) + self.env.buffer.waiting < self._usable
        ):
            if self.env.book.stopping or not self.env.book.has_budget(self.group_size + self._replacements()):
                return
            expired = self._expired.pop(0) if self._expired else None
            prompt = self.env.tasks.draw() if expired is None else expired.prompt
            group = self.env.open_group(prompt, self.group_size, again=None if expired is None else expired.number)
            group.min_size = self.min_group
            self._open[group.number] = group
            for trial in list(group.in_flight.values()):
                self._start(group, trial)

    def _replacements(self) -> int:
        """How many trials to keep for replacements in the open groups and one more, at the rate of losses so far."""
        if self.min_group == 1 or not self._lost:
            return 0
        missing = self.group_size + sum(group.size - group.judged for group in self._open.values())
        rate = min(self._lost / self._ended, _MAX_LOSS_RATE)
        # Of a negative binomial distribution, the mean and two standard deviations.
        return math.ceil((missing * rate + 2 * math.sqrt(missing * rate)) / (1 - rate))

    def _start(self, group: Group, trial: Trial) -> None:
        if self._paused:
            return  # `resume` starts it
        task = asyncio.get_running_loop().create_task(self._roll(group, trial))
        self._tasks[trial.number] = task
        task.add_done_callback(lambda task: self._remove(trial.number, task))

    async def _roll(self, group: Group, trial: Trial) -> None:
        episode = await self.env.roll(group, trial)
        self._ended += 1
        self._lost += episode.fault not in (None, Fault.POLICY)
        if not self._flush_scheduled:
            # All commits of this event loop tick go to disk in one transaction.
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)
        self._continue(group)

    def _continue(self, group: Group) -> None:
        """Replace lost trials, and complete the group if it is finished. A resumed run continues what is not."""
        for trial in self.env.refill(group):
            self._start(group, trial)
        if not group.in_flight and not (group.missing and self.env.book.stopping):
            self._complete(group)

    def _complete(self, group: Group) -> None:
        del self._open[group.number]
        buffer = self.env.buffer
        rewards = {episode.reward.value for episode in group.episodes.values() if episode.reward is not None}
        if group.judged < self.min_group:
            self._discard(group, "short" if group.judged else "failed")
        elif self.config.filter == "equal_rewards" and len(rewards) <= 1:
            self._discard(group, "filtered")
        else:
            buffer.ready(group.number, group.version(self.version, newest=self.config.staleness == "token"))
            self._finished[group.number] = group
        if self._is_async:
            self._top_up()
        self._progress.set()

    def _discard(self, group: Group, status: str) -> None:
        self.env.buffer.close(group.number, status)
        self._discarded_now.add(group, status)

    def _remove(self, number: int, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(number, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A failed rollout is data; this is a bug, or a full disk.
            self._error = error
            self._progress.set()

    # -- the ledger ----------------------------------------------------------------------------------

    def _load(self, number: int) -> Group:
        """A finished group, from memory or, if an earlier process made it, from the ledger."""
        if number in self._finished:
            return self._finished.pop(number)
        group = self.env.load_group(number, self.group_size)
        group.min_size = self.min_group
        return group

    def _flush(self) -> None:
        self._flush_scheduled = False
        try:
            self.env.book.ledger.flush()
        except Exception as error:  # noqa: BLE001  raised to the caller that waits for the batch
            self._error = error
            self._progress.set()
