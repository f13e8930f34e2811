"""The producer: keeps a trainer supplied with groups of judged rollouts, and loses none of them.

Synchronous production makes a batch when it is asked for one. Asynchronous production keeps more groups in flight than
a batch needs and hands out those that are done first; the others go on and are in a later batch.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Any

from loopwright.core.episode import Episode
from loopwright.core.errors import LoopwrightError
from loopwright.core.trial import Trial
from loopwright.rollouts.env import RolloutEnv
from loopwright.rollouts.group import DiscardedGroups, Group
from loopwright.rollouts.loops.worker import WeightUpdate
from loopwright.rollouts.produce import ProduceConfig

log = logging.getLogger(__name__)
_MOST_LEFT_OUT = 10
"""How many groups may be left out for a batch, as a multiple of its size."""


class ProductionFailed(LoopwrightError, RuntimeError):
    """Group after group came to nothing."""


class Producer:
    """Production of one run. All scheduling is on the running event loop and its clock, simulated or not."""

    def __init__(self, env: RolloutEnv, config: ProduceConfig, *, group_size: int) -> None:
        self.env, self.config, self.group_size = env, config, group_size
        self.version = 0
        self.discarded = DiscardedGroups()
        """What was produced for the last batch and is not in it."""
        self._left_out = DiscardedGroups()
        self._open: dict[int, Group] = {}
        self._done: dict[int, Group] = {}
        self._again: list[Group] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._going = asyncio.Event()
        self._going.set()
        self._bug: BaseException | None = None
        self._most_open = self._most_ahead = 0
        self._flushing = False

    # -- for the trainer ----------------------------------------------------------------------------------------

    async def batch(self, size: int, step: int) -> list[Group]:
        """The next groups to train on, for this step: `size` of them, or fewer when the budget is used up.

        Fewer, too, when ten times as many came to nothing meanwhile; ProductionFailed if not one is ready by then.
        """
        while True:
            if self._bug is not None:
                raise self._bug
            self._expire()
            self._aim(size)
            self._top_up()
            waiting = self.env.buffer.waiting
            if waiting >= size or not self._open or self._in_vain(size):
                if not self._ahead:
                    self._most_open = 0
                self.discarded, self._left_out = self._left_out, DiscardedGroups()
                return [self._load(number) for number in self.env.buffer.take(size, step)]
            self._news.clear()
            await self._news.wait()

    async def update(self, version: int, weights: Any = None) -> None:
        """The policy has new weights. Rollouts in flight go on under them, or are begun again."""
        if not self.config.partial:
            await self.pause()
        await self.env.publish(WeightUpdate(version, paused=True, weights=weights))
        await self.env.publish(WeightUpdate(version, weights=weights))
        self.version = version
        self.resume()

    async def pause(self, drain_s: float | None = None) -> int:
        """Stop production: rollouts have `drain_s` to end, the rest is cancelled and attempted again on `resume`.

        When this returns nothing is in flight. Returns how many were cancelled.
        """
        self._going.clear()
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
        """Go on with production."""
        if self._going.is_set():
            return
        self._going.set()
        for group in list(self._open.values()):
            for trial in list(group.flying.values()):
                self._start(group, trial)
        if self._ahead:
            self._top_up()

    def restore(self, step: int) -> None:
        """Go on from the ledger, where training goes on after this step: open groups are finished, none is lost."""
        buffer = self.env.buffer
        buffer.restore(step)
        self.env.tasks.restore(buffer.drawn())
        self._again = [self._load(number) for number in buffer.owed()]
        for number in buffer.unfinished():
            group = self._load(number)
            self._open[number] = group
            for trial in list(group.flying.values()):
                self._start(group, trial)
            self._go_on(group, self.env.refilled(group))

    @property
    def in_flight(self) -> int:
        """How many rollouts are under way."""
        return sum(not task.done() for task in self._tasks.values())

    # -- production ---------------------------------------------------------------------------------------------

    @property
    def _ahead(self) -> bool:
        return self.config.type == "async"

    def _in_vain(self, size: int) -> bool:
        """Whether so much was left out that what is ready has to do."""
        tried, ready = self._left_out.groups.total(), self.env.buffer.waiting
        if tried < _MOST_LEFT_OUT * size:
            return False
        if not ready:
            raise ProductionFailed(
                f"{tried} groups in a row gave nothing to train on: {self._left_out}. "
                "Mend what fails, or choose tasks that are neither too easy nor too hard."
            )
        log.warning("a batch has %d groups instead of %d: of the others %s", ready, size, self._left_out)
        return True

    def _aim(self, size: int) -> None:
        """How much to have under way for batches of this size, without making what would be too old when it is used."""
        if self._ahead:
            self._most_open = math.ceil(size * (1 + self.config.over_sample))
            self._most_ahead = self._most_open + size * self.config.max_staleness
        else:
            self._most_open = self._most_ahead = size

    def _top_up(self) -> None:
        """Begin groups until there are as many, open or ready, as are wanted."""
        while (
            self._going.is_set()
            and len(self._open) < self._most_open
            and len(self._open) + self.env.buffer.waiting < self._most_ahead
        ):
            if self.env.book.stopping or not self.env.book.has_budget(self.group_size):
                return
            old = self._again.pop(0) if self._again else None
            prompt = self.env.tasks.draw() if old is None else old.prompt
            group = self.env.begin(prompt, self.group_size, again=None if old is None else old.number)
            self._open[group.number] = group
            for trial in list(group.flying.values()):
                self._start(group, trial)

    def _start(self, group: Group, trial: Trial) -> None:
        if not self._going.is_set():
            return  # `resume` will
        task = asyncio.get_running_loop().create_task(self._roll(group, trial))
        self._tasks[trial.number] = task
        task.add_done_callback(lambda done: self._ended(trial.number, done))

    async def _roll(self, group: Group, trial: Trial) -> None:
        more = await self.env.roll(group, trial)
        self._flush_soon()
        self._go_on(group, more)

    def _go_on(self, group: Group, more: Sequence[Trial]) -> None:
        """A sample that was lost is made again, alone; what is not done when the run stops is resumed."""
        for trial in more:
            self._start(group, trial)
        if not group.flying and not (group.missing and self.env.book.stopping):
            self._complete(group)

    def _complete(self, group: Group) -> None:
        del self._open[group.number]
        buffer = self.env.buffer
        if not any(episode.in_baseline for episode in group.episodes.values()):
            self._leave_out(group, "failed")
        elif self.config.filter == "equal_rewards" and _all_equal(list(group.episodes.values())):
            self._leave_out(group, "filtered")
        else:
            buffer.ready(group.number, group.version(self.version, newest=self.config.staleness == "token"))
            self._done[group.number] = group
        if self._ahead:
            self._top_up()
        self._news.set()

    def _leave_out(self, group: Group, status: str) -> None:
        self.env.buffer.close(group.number, status)
        self._left_out.add(group, status)

    def _ended(self, number: int, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(number, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A failed rollout is data; this is a bug, or a disk that takes no more.
            self._bug = error
            self._news.set()

    def _expire(self) -> None:
        """What is too old is rolled again: its prompt comes next."""
        for number in self.env.buffer.expire(self.version - self.config.max_staleness):
            self._again.append(self._load(number))

    # -- what is in the ledger ----------------------------------------------------------------------------------

    def _load(self, number: int) -> Group:
        """A group: from memory, or from the ledger if an earlier process made it."""
        if number in self._done:
            return self._done.pop(number)
        return self.env.recorded(number, self.group_size)

    def _flush_soon(self) -> None:
        """Have what was committed on disk at the end of this tick, in one transaction."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        try:
            self.env.book.ledger.flush()
        except Exception as error:  # noqa: BLE001  whoever waits for a batch is told
            self._bug = error
            self._news.set()


def _all_equal(episodes: Sequence[Episode]) -> bool:
    return len({episode.reward.value for episode in episodes if episode.reward is not None}) <= 1
