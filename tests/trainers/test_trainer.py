"""The trainer with a learner that learns nothing: what it tells the engines, and what it makes of bad steps."""

import asyncio
import time
from contextlib import closing
from itertools import count

import pytest

from loopwright.rollouts.pools.base import Worker
from loopwright.trainers.failure import TrainingFailed
from loopwright.trainers.grpo import GrpoConfig, GrpoTrainer
from loopwright.trainers.trainer import _Training
from tests.rollouts.harness import World, spoken

FINE = {"updates": 1.0, "skipped": 0.0}


class Pausing(Worker):
    """A loop whose engine says nothing while it is paused; `updates` is all that it was told."""

    def __init__(self):
        self.version, self.updates, self._open = 0, [], asyncio.Event()
        self._open.set()

    async def handle(self, request):
        await asyncio.sleep(0.02)
        await self._open.wait()
        return spoken(request.task, self.version)

    async def apply_update(self, update):
        self.updates.append(update)
        self.version = update.version
        self._open.clear() if update.paused else self._open.set()
        return self.version

    @property
    def paused(self):
        return not self._open.is_set()


class FakeLearner:
    """Does as it is told to by `learn`."""

    def __init__(self, learn=lambda step: FINE):
        self.learn, self.learned = learn, []

    def update(self, samples, step):
        self.learned.append(step)
        return dict(self.learn(step))

    def weights(self):
        return f"after {len(self.learned)}"

    def write(self, directory): ...

    def read(self, directory): ...

    def save(self, directory): ...

    def close(self): ...


def training(directory, learner, *, produce=None, **options):
    """A training of a few steps, with its worker."""
    worker, rewards = Pausing(), count()
    world = World(directory, None, worker=worker, verdict=lambda _: next(rewards), group_size=2, **(produce or {}))
    config = GrpoConfig(**{"steps": 3, "prompts_per_step": 2, "group_size": 2, **options})
    made = _Training(GrpoTrainer(world.env, config))
    made._build_learner = lambda: learner
    return made, worker


async def ended(made, within_s=20.0):
    with closing(made.env.book.ledger):
        async with asyncio.timeout(within_s):
            await made.run()


def test_the_engine_gets_the_first_weights_too(tmp_path):
    async def story():
        made, worker = training(tmp_path, FakeLearner())
        await ended(made)
        return worker.updates

    told = asyncio.run(story())
    assert [(update.version, update.paused, update.weights) for update in told[:2]] == [
        (0, True, "after 0"),
        (0, False, "after 0"),
    ]


def test_rollouts_that_may_not_go_on_end_before_the_engine_rests(tmp_path):
    """Otherwise every step would wait for `drain_s`, here half a minute."""
    produce = {"type": "async", "partial": False, "drain_s": 30.0}

    async def story():
        made, _ = training(tmp_path, FakeLearner(), produce=produce, colocated=True)
        begun = time.monotonic()
        await ended(made, 100)
        return time.monotonic() - begun

    assert asyncio.run(story()) < 15


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_an_engine_that_rests_goes_on_when_training_ends_early(tmp_path, how):
    """It may be an external gateway's, which serves others, too."""
    learning = []

    def learn(step):
        learning.append(step)
        if how == "fails":
            raise TrainingFailed("no more")
        time.sleep(0.2)
        return FINE

    async def story():
        made, worker = training(tmp_path, FakeLearner(learn), colocated=True)
        running = asyncio.ensure_future(ended(made))
        while not learning:
            await asyncio.sleep(0.01)
        if how == "is cancelled":
            assert worker.paused
            running.cancel()
        with pytest.raises(TrainingFailed if how == "fails" else asyncio.CancelledError):
            await running
        assert not worker.paused
        assert {update.version for update in worker.updates} == {0}, "and under the weights that it has"

    asyncio.run(story())


def test_only_steps_that_changed_nothing_count_as_bad_and_only_those_that_did_end_the_count(tmp_path):
    async def story():
        made, _ = training(tmp_path, FakeLearner(), bad_steps=3)
        made.env.book.ledger.close()
        skipped, partly = {"updates": 0.0, "skipped": 2.0}, {"updates": 1.0, "skipped": 1.0}
        counted = []
        for told in (skipped, {}, skipped, partly, skipped, FINE, skipped, {"updates": 0.0, "skipped": 0.0}):
            made._count_failures(1, told)
            counted.append(made._failed_steps)
        assert counted == [1, 1, 2, 0, 1, 0, 1, 1]

    asyncio.run(story())


def test_a_training_that_gave_up_goes_on_after_its_bad_steps_when_it_is_resumed(tmp_path):
    """Also where checkpoints are rare: its batches would be as bad again."""

    async def story(learner):
        made, _ = training(tmp_path, learner, steps=6, bad_steps=2, checkpoint_every=100)
        await ended(made)

    first = FakeLearner(lambda step: {"updates": 0.0, "skipped": 1.0} if step in (2, 3) else FINE)
    with pytest.raises(TrainingFailed, match=r"2 steps in a row, up to step 3"):
        asyncio.run(story(first))
    second = FakeLearner()
    asyncio.run(story(second))
    assert (first.learned, second.learned) == ([1, 2, 3], [4, 5, 6])
