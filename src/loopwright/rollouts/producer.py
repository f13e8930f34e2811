"""The producer: supplies a trainer with groups of judged rollouts, and loses none of them.

Synchronous production makes a batch on request. Asynchronous production keeps more groups in flight than a batch needs
and hands out those that finish first; the others continue and are in a later batch.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Any

from loopwright.core.errors import LoopwrightError
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.trial import Trial
from loopwright.rollouts.env import RolloutEnv
from loopwright.rollouts.group import MAX_TRIALS_IF_SHORT, DiscardedGroups, Group
from loopwright.rollouts.lane import Lane, Lanes
from loopwright.rollouts.loops.worker import WeightUpdate
from loopwright.rollouts.produce_config import ProduceConfig

log = logging.getLogger(__name__)
_LOSSES = (Outcome.LOST, Outcome.CRASHED, Outcome.TIMEOUT, Outcome.JUDGE_FAILED)
_MAX_LOSS_RATE = 0.9
"""Above this, more budget for replacements would hardly save a group."""
_FLUSH_S = 0.05
"""Seconds after which the results of finished rollouts are on disk."""
_DEVIATIONS = 1.5
"""How far above the measured one the rate of losses may be, in standard deviations."""


class ProductionFailed(LoopwrightError, RuntimeError):
    """Too many groups in a row failed or were filtered."""


class GroupProducer:
    """Produces the groups of one run. It schedules by the running event loop's clock, which may be simulated."""

    def __init__(self, env: RolloutEnv, config: ProduceConfig, *, group_size: int, min_group: int = 1) -> None:
        self.env, self.config, self.group_size, self.min_group = env, config, group_size, min_group
        self.version = 0
        self.discarded = DiscardedGroups()
        """The groups that were produced for the last batch and are not in it."""
        self._lanes = Lanes(env, config)
        self._open: dict[int, Group] = {}
        self._finished: dict[int, Group] = {}
        self._tasks: dict[int, tuple[Lane, asyncio.Task[None]]] = {}
        self._progress = asyncio.Event()
        self._error: BaseException | None = None
        self._batch_size = self._next_version = 0
        self._batches_left = math.inf
        self._flush_scheduled = self._warned_short = self._warned_rest = False
        self._ended = self._lost = 0
        """Rollouts, and those of them that do not count; for the budget to keep for replacements."""

    # -- for the trainer ----------------------------------------------------------------------------------------

    async def batch(self, size: int, step: int, last_step: int | None = None) -> list[Group]:
        """The next groups to train on, for this step: `size` of them, or fewer when the budget is exhausted.

        Also fewer once ten times as many were discarded; ProductionFailed if none is ready by then. Nothing is
        produced for steps after `last_step`.
        """
        while True:
            if self._error is not None:
                raise self._error
            self._batch_size, self._next_version = size, self.version
            self._batches_left = math.inf if last_step is None else last_step - step + 1
            self._lanes.aim(size)
            for lane in self._lanes.all:
                # The prompts of groups that are too old are attempted again first.
                oldest = self.version - lane.config.max_staleness
                lane.expired += [self._load(number) for number in self.env.buffer.expire(oldest, lane.sources)]
            self._top_up(*self._lanes.all)
            # Each lane has its part of the batch, or will not have more of it.
            waiting_of = self.env.buffer.waiting_of
            lanes = self._lanes.all
            if all(waiting_of(lane.sources) >= lane.quota or not lane.open or self._give_up(lane) for lane in lanes):
                return self._take(step)
            self._progress.clear()
            await self._progress.wait()

    def _take(self, step: int) -> list[Group]:
        """The groups of a batch."""
        self._next_version = self.version + 1  # what is opened now is used after the next update
        self._batches_left -= 1
        self.discarded = DiscardedGroups()
        numbers: list[int] = []
        for lane in self._lanes.all:
            groups = self.env.buffer.take(lane.quota, step, lane.sources)
            self._lanes.use(lane, len(groups))
            numbers += groups
            if len(groups) < lane.quota and lane.is_hopeless:
                message = "a batch has %d groups%s instead of %d; of the others, %s"
                log.warning(message, len(groups), lane.of_sources, lane.quota, lane.discarded)
            if not lane.is_async:
                lane.max_open = 0
            self.discarded += lane.discarded
            lane.discarded = DiscardedGroups()
        self._warn_if_short()
        return [self._load(number) for number in sorted(numbers)]

    async def update(self, version: int, weights: Any = None) -> None:
        """Publish new weights. Rollouts in flight continue with them, or start again if `partial` is off."""
        await self.pause_for_update()
        await self.env.publish(WeightUpdate(version, paused=True, weights=weights))
        await self.env.publish(WeightUpdate(version, weights=weights))
        self.version = version
        self.resume()

    async def pause(self, drain_s: float | None = None) -> int:
        """Stop production. Rollouts get `drain_s` to finish; the others are cancelled and started again on `resume`.

        Nothing is in flight when this returns. Returns how many were cancelled.
        """
        return await self._pause(self._lanes.all, drain_s)

    async def pause_for_update(self) -> int:
        """Stop the production of rollouts that may not continue with new weights."""
        return await self._pause([lane for lane in self._lanes.all if not lane.config.partial])

    async def _pause(self, lanes: Sequence[Lane], drain_s: float | None = None) -> int:
        for lane in lanes:
            lane.is_paused = True
        cancelled = await asyncio.gather(
            *(self._drain(lane, lane.config.drain_s if drain_s is None else drain_s) for lane in lanes)
        )
        self.env.book.ledger.flush()
        return sum(cancelled)

    async def _drain(self, lane: Lane, drain_s: float) -> int:
        tasks = [task for owner, task in self._tasks.values() if owner is lane]
        if tasks and drain_s > 0:
            await asyncio.wait(tasks, timeout=drain_s)
        cancelled = {number: task for number, (owner, task) in self._tasks.items() if owner is lane}
        for task in cancelled.values():
            task.cancel()
        await asyncio.gather(*cancelled.values(), return_exceptions=True)
        for number in cancelled:
            self._tasks.pop(number, None)
        return len(cancelled)

    def resume(self) -> None:
        """Continue production."""
        for lane in self._lanes.all:
            if not lane.is_paused:
                continue
            lane.is_paused = False
            for number in sorted(lane.open):
                group = self._open[number]
                for trial in list(group.in_flight.values()):
                    self._start(group, trial)
            if lane.is_async:
                self._top_up(lane)

    def restore(self, step: int) -> None:
        """Continue from the ledger after this training step: open groups are finished, none is lost."""
        buffer = self.env.buffer
        buffer.restore(step)
        counts = self.env.book.ledger.counts()
        self._ended, self._lost = sum(counts.values()), sum(counts.get(outcome, 0) for outcome in _LOSSES)
        self.env.tasks.restore(buffer.draws())
        self._lanes.restore(buffer.uses())
        for number in buffer.expired():
            group = self._load(number)
            self._lanes.of(group.prompt.source).expired.append(group)
        for number in buffer.unfinished():
            group = self._load(number)
            self._open[number] = group
            self._lanes.of(group.prompt.source).open.add(number)
            for trial in list(group.in_flight.values()):
                self._start(group, trial)
            self._continue(group)

    @property
    def in_flight(self) -> int:
        """How many rollouts are running."""
        return sum(not task.done() for _, task in self._tasks.values())

    # -- production ---------------------------------------------------------------------------------------------

    def _give_up(self, lane: Lane) -> bool:
        """Whether so many groups were discarded that the batch is what is ready."""
        if lane.is_hopeless and not self.env.buffer.waiting_of(lane.sources):
            count = lane.discarded.groups.total()
            raise ProductionFailed(
                f"{count} groups{lane.of_sources} in a row gave nothing to train on: {lane.discarded}. "
                "Fix what fails, or choose tasks that are neither too easy nor too hard."
            )
        return lane.is_hopeless

    def _warn_if_short(self) -> None:
        if (short := self.discarded.groups["short"]) and not self._warned_short:
            self._warned_short = True
            log.warning(
                "groups with fewer than %d judged rollouts (`min_group`) are replaced, %d so far; the last failure: "
                "%s. The report counts further ones.",
                self.min_group,
                short,
                self.discarded.last_failure,
            )

    def _top_up(self, *lanes: Lane) -> None:
        """Open groups until there are enough, open or ready. Several lanes share the rest of the budget by weight."""
        updates, left, last = self._next_version - self.version, self._batches_left, self.env.book.group
        while True:
            waiting = {lane.name: self.env.buffer.waiting_of(lane.sources) for lane in lanes}
            lanes = tuple(
                lane
                for lane in lanes
                if not lane.is_paused
                and len(lane.open) < lane.max_open
                and len(lane.open) + waiting[lane.name] < self._lanes.usable(lane, self._batch_size, updates, left)
            )
            if not lanes or self.env.book.stopping:
                break
            if not self.env.book.has_budget(self.group_size + self._replacements()):
                if not self._open and self.env.book.has_budget(self.group_size) and not self._warned_rest:
                    self._warned_rest = True
                    message = "the rest of `trials` is too little for a whole group: %d of %d rollouts failed"
                    log.warning(message, self._lost, self._ended)
                break
            lane = self._lanes.furthest_behind(lanes, waiting)
            expired = lane.expired.pop(0) if lane.expired else None
            prompt = self.env.tasks.draw(lane.sources) if expired is None else expired.prompt
            again = None if expired is None else expired.number
            group = self.env.open_group(prompt, self.group_size, again=again, hold=True)
            group.min_size = self.min_group
            self._open[group.number] = group
            lane.open.add(group.number)
            for trial in list(group.in_flight.values()):
                self._start(group, trial)
        if self.env.book.group > last:
            self.env.book.ledger.flush()  # before any of them runs, and all of them at once

    def _replacements(self) -> int:
        """How many trials to keep for replacements in the open groups and one more, at the rate of losses so far."""
        if self.min_group == 1:
            return 0
        missing = self.group_size + sum(group.size - group.judged for group in self._open.values())
        if not self._open:  # a single group endangers no other
            rate = min(self._lost / max(self._ended, 1), _MAX_LOSS_RATE)
            return math.ceil(missing * rate / (1 - rate))
        # The rate itself is uncertain, above all in the beginning: the upper end of Wilson's interval.
        weight = self._ended + _DEVIATIONS**2
        center = (self._lost + _DEVIATIONS**2 / 2) / weight
        rate = min(center + _DEVIATIONS * math.sqrt(center * (1 - center) / weight), _MAX_LOSS_RATE)
        # Of a negative binomial distribution, the mean and two standard deviations; or all that the groups may use.
        replacements = math.ceil((missing * rate + 2 * math.sqrt(missing * rate)) / (1 - rate))
        return min(replacements, (len(self._open) + 1) * (MAX_TRIALS_IF_SHORT - 1) * self.group_size)

    def _start(self, group: Group, trial: Trial) -> None:
        lane = self._lanes.of(group.prompt.source)
        if lane.is_paused:
            return  # `resume` starts it
        task = asyncio.get_running_loop().create_task(self._roll(group, trial))
        self._tasks[trial.number] = lane, task
        task.add_done_callback(lambda task: self._remove(trial.number, task))

    async def _roll(self, group: Group, trial: Trial) -> None:
        episode = await self.env.roll(group, trial)
        self._ended += 1
        self._lost += episode.fault not in (None, Fault.POLICY)
        if not self._flush_scheduled:
            # What ends within this time goes to disk in one transaction. After a `kill -9` it is attempted again.
            self._flush_scheduled = True
            asyncio.get_running_loop().call_later(_FLUSH_S, self._flush)
        self._continue(group)

    def _continue(self, group: Group) -> None:
        """Replace lost trials, and complete the group if it is finished. A resumed run continues what is not."""
        for trial in self.env.refill(group):
            self._start(group, trial)
        if not group.in_flight and not (group.missing and self.env.book.stopping):
            self._complete(group)

    def _complete(self, group: Group) -> None:
        del self._open[group.number]
        lane = self._lanes.of(group.prompt.source)
        lane.open.remove(group.number)
        rewards = {episode.reward.value for episode in group.episodes.values() if episode.reward is not None}
        if group.judged < self.min_group:
            self._discard(lane, group, "short" if group.judged else "failed")
        elif lane.config.filter == "equal_rewards" and len(rewards) <= 1:
            self._discard(lane, group, "filtered")
        else:
            newest = lane.config.staleness == "token"
            self.env.buffer.ready(group.number, group.version(self.version, newest=newest))
            self._finished[group.number] = group
        if lane.is_async:
            self._top_up(lane)
        self._progress.set()

    def _discard(self, lane: Lane, group: Group, status: str) -> None:
        self.env.buffer.close(group.number, status)
        lane.discarded.add(group, status)

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
