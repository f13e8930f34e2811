"""The trainer with a fake learner: its weight updates, and how it handles bad steps."""

import asyncio
import time
from contextlib import closing
from dataclasses import replace
from itertools import count

import pytest

from loopwright.core.outcome import OUT_OF_TIME, Outcome
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.steps import steps as ledger_steps
from loopwright.rollouts.evaluation import EvalConfig
from loopwright.rollouts.pools.base import Worker
from loopwright.trainers.failure import TrainingFailed
from loopwright.trainers.grpo import GrpoConfig, GrpoTrainer
from loopwright.trainers.trainer import _Training
from tests.rollouts.harness import World, episode_of, tasks

FINE = {"updates": 1.0, "skipped": 0.0}


class Pausing(Worker):
    """A worker whose engine generates nothing while it is paused; `updates` records the weight updates."""

    def __init__(self):
        self.version, self.updates, self._open = 0, [], asyncio.Event()
        self._open.set()

    async def handle(self, request):
        await asyncio.sleep(0.02)
        await self._open.wait()
        return episode_of(request.task, self.version)

    async def apply_update(self, update):
        self.updates.append(update)
        self.version = update.version
        self._open.clear() if update.paused else self._open.set()
        return self.version

    @property
    def paused(self):
        return not self._open.is_set()


class FakeLearner:
    """Returns what `learn` returns."""

    def __init__(self, learn=lambda step: FINE):
        self.learn, self.batches = learn, []

    def update(self, samples, step):
        self.batches.append(step)
        return dict(self.learn(step))

    def weights(self):
        return f"after {len(self.batches)}"

    def write(self, directory): ...

    def read(self, directory): ...

    def save(self, directory): ...

    def close(self): ...


def training(directory, learner, *, produce=None, worker=None, **options):
    """A training of a few steps, with its worker."""
    worker, rewards = worker or Pausing(), count()
    world = World(directory, None, worker=worker, verdict=lambda _: next(rewards), group_size=2, **(produce or {}))
    config = GrpoConfig(**{"steps": 3, "prompts_per_step": 2, "group_size": 2, **options})
    training_run = _Training(GrpoTrainer(world.env, config))
    training_run._build_learner = lambda: learner
    return training_run, worker


async def run_to_end(training_run, within_s=20.0):
    with closing(training_run.env.book.ledger):
        async with asyncio.timeout(within_s):
            await training_run.run()


def test_the_engine_gets_the_first_weights_too(tmp_path):
    async def body():
        training_run, worker = training(tmp_path, FakeLearner())
        await run_to_end(training_run)
        return worker.updates

    updates = asyncio.run(body())
    assert [(update.version, update.paused, update.weights) for update in updates[:2]] == [
        (0, True, "after 0"),
        (0, False, "after 0"),
    ]


def test_rollouts_that_may_not_continue_end_before_the_engine_pauses(tmp_path):
    """Otherwise every step would wait for `drain_s`, here half a minute."""
    produce = {"type": "async", "partial": False, "drain_s": 30.0}

    async def body():
        training_run, _ = training(tmp_path, FakeLearner(), produce=produce, colocated=True)
        start = time.monotonic()
        await run_to_end(training_run, 100)
        return time.monotonic() - start

    assert asyncio.run(body()) < 15


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_a_paused_engine_resumes_when_training_ends_early(tmp_path, how):
    """It may belong to an external gateway that also serves others."""
    learning = []

    def learn(step):
        learning.append(step)
        if how == "fails":
            raise TrainingFailed("no more")
        time.sleep(0.2)
        return FINE

    async def body():
        training_run, worker = training(tmp_path, FakeLearner(learn), colocated=True)
        running = asyncio.ensure_future(run_to_end(training_run))
        while not learning:
            await asyncio.sleep(0.01)
        if how == "is cancelled":
            assert worker.paused
            running.cancel()
        with pytest.raises(TrainingFailed if how == "fails" else asyncio.CancelledError):
            await running
        assert not worker.paused
        assert {update.version for update in worker.updates} == {0}, "with the weights that it has"

    asyncio.run(body())


def test_skipped_steps_count_as_bad_and_a_good_step_resets_the_count(tmp_path):
    async def body():
        training_run, _ = training(tmp_path, FakeLearner(), bad_steps=3)
        training_run.env.book.ledger.close()
        skipped, partly = {"updates": 0.0, "skipped": 2.0}, {"updates": 1.0, "skipped": 1.0}
        counted = []
        for numbers in (skipped, {}, skipped, partly, skipped, FINE, skipped, {"updates": 0.0, "skipped": 0.0}):
            training_run._count_failures(1, numbers)
            counted.append(training_run._failed_steps)
        assert counted == [1, 1, 2, 0, 1, 0, 1, 1]

    asyncio.run(body())


def test_a_resumed_training_continues_after_its_bad_steps(tmp_path):
    """Also if checkpoints are rare: the same batches would be bad again."""

    async def body(learner):
        training_run, _ = training(tmp_path, learner, steps=6, bad_steps=2, checkpoint_every=100)
        await run_to_end(training_run)

    first = FakeLearner(lambda step: {"updates": 0.0, "skipped": 1.0} if step in (2, 3) else FINE)
    with pytest.raises(TrainingFailed, match=r"2 steps in a row, up to step 3"):
        asyncio.run(body(first))
    second = FakeLearner()
    asyncio.run(body(second))
    assert (first.batches, second.batches) == ([1, 2, 3], [4, 5, 6])


class Stored(FakeLearner):
    """A learner whose weights are the number of its updates."""

    updates = 0

    def update(self, samples, step):
        self.updates += 1
        return super().update(samples, step)

    def weights(self):
        return self.updates

    def write(self, directory):
        (directory / "weights").write_text(str(self.updates))

    def read(self, directory):
        self.updates = int((directory / "weights").read_text())


class Late(Pausing):
    """Rollouts of evaluations are cut off, unless it is on time; notes which weights evaluated which task."""

    def __init__(self, *, on_time):
        super().__init__()
        self.on_time, self.weights, self.evaluated_with = on_time, None, set()

    async def handle(self, request):
        if not request.task.id.startswith("h"):
            return await super().handle(request)
        self.evaluated_with.add(self.weights)
        episode = episode_of(request.task, self.version, outcome=Outcome.OK if self.on_time else Outcome.TRUNCATED)
        return replace(episode, reason="" if self.on_time else f"{OUT_OF_TIME} 5 s; it waited for tools")

    async def apply_update(self, update):
        self.weights = self.weights if update.weights is None else update.weights
        return await super().apply_update(update)


def test_p02_resume_repeats_unreliable_evaluations_with_the_weights_that_they_had(tmp_path):
    """As far as these are still there: before training, and in the checkpoints that are kept."""

    async def body(worker, steps):
        options = {"steps": steps, "checkpoint_every": 2, "keep": 2, "worker": worker}
        training_run, _ = training(tmp_path, Stored(), produce={"held_out": {"h": tasks(4, "h")}}, **options)
        training_run.env.evaluation = EvalConfig(tasks=({"type": "jsonl", "path": "h.jsonl"},), every=2)
        await run_to_end(training_run)
        with closing(Ledger.read(tmp_path / "ledger.db")) as ledger:
            evals = {each.step: each.numbers for each in ledger_steps(ledger, "eval")}
        return [(step, bool(numbers.get("unreliable")), numbers.get("repeats")) for step, numbers in evals.items()]

    first, second = Late(on_time=False), Late(on_time=True)
    assert asyncio.run(body(first, 6)) == [(step, True, None) for step in (0, 2, 4, 6)]
    assert first.evaluated_with == {0, 2, 4, 6}
    fixed = [(0, False, 1), (2, True, None), (4, False, 1), (6, False, 1), (8, False, None)]
    assert asyncio.run(body(second, 8)) == fixed
    assert second.evaluated_with == {0, 4, 6, 8}
