"""The base of all trainers: produce, learn, publish, write down; again until the steps are done."""

import asyncio
import logging
import time
import traceback
from abc import ABC
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from loopwright.core.agent import Agent
from loopwright.core.errors import LoopwrightError, MissingExtra, Problem, StorageError, sentence
from loopwright.core.eventloop import run
from loopwright.engines.base import Sampling
from loopwright.engines.weight_update import WeightUpdate
from loopwright.ledger.steps import Kind, Step, Steps
from loopwright.rollouts.config import RolloutConfig
from loopwright.rollouts.env import RolloutEnv
from loopwright.rollouts.evaluation import summary
from loopwright.rollouts.group import DiscardedGroups, Group
from loopwright.rollouts.producer import Producer
from loopwright.trainers.algorithm import Algorithm
from loopwright.trainers.checkpoint import Checkpoints
from loopwright.trainers.config import TrainConfig
from loopwright.trainers.curves import Curves, uninstalled
from loopwright.trainers.failure import TrainingFailed
from loopwright.trainers.sample import Sample, narrows, samples_of

if TYPE_CHECKING:
    from loopwright.trainers.learners import RunLearner

log = logging.getLogger(__name__)
T = TypeVar("T")
_WAKE_S = 10.0


class Trainer(Agent, ABC):
    """Trains a policy on its own rollouts. What it learned is in its checkpoints, what it learned from in the ledger.

    A step is whole or has not happened: rollouts are taken for it, the weights change, the checkpoint is on disk, and
    only then do they count as trained on. A run that was killed repeats what came after its last checkpoint, from the
    rollouts that were recorded for it.
    """

    gives_weights: ClassVar[bool] = True
    algorithm: ClassVar[type[Algorithm]]
    env: RolloutEnv
    config: TrainConfig

    @classmethod
    def problems(cls, config: TrainConfig, space: Any, home: Path) -> list[Problem]:
        needed = {"torch": "train", "transformers": "train", **({"peft": "train"} if config.lora else {})}
        if config.workers:
            needed["ray"] = "ray"
        missing = [(name, extra) for name, extra in needed.items() if find_spec(name) is None]
        found = [
            Problem("type", str(MissingExtra(f"agent {config.type!r} ({name})", extra))) for name, extra in missing
        ]
        found += [Problem("log", f"needs: pip install {package}") for package in uninstalled(config.log)]
        if isinstance(space, RolloutConfig):
            found += _narrowed(space.loop.sampling)
        return found

    def run(self) -> int:
        """Train; 1 if that failed, which leaves the other runs of the scenario unharmed."""
        ledger = self.env.book.ledger
        ledger.set_state("failure", None)
        try:
            run(self._stoppable())
        except StorageError:
            raise
        except LoopwrightError as error:
            log.error("%s Then go on with `loopwright resume`: nothing that was recorded is lost.", sentence(error))
            ledger.set_state("failure", str(error))
            return 1
        except Exception as error:
            log.exception("the training of run %r failed; go on with `loopwright resume`", self.env.book.name)
            ledger.set_state("failure", "".join(traceback.format_exception(error)))
            return 1
        return 0

    async def _stoppable(self) -> None:
        loop = asyncio.get_running_loop()
        work = asyncio.ensure_future(_Training(self).run())
        self.env.book.when_stopped(lambda: loop.call_soon_threadsafe(work.cancel))
        try:
            await work
        except asyncio.CancelledError:
            if not self.env.book.stopping:
                raise
        finally:
            self.env.book.when_stopped(None)


def _narrowed(sampling: Sampling) -> list[Problem]:
    """What cannot be trained on: the logprobs of a distribution that the policy alone does not have."""
    where = "[run.rollout] loop.sampling"
    if sampling.temperature == 0:
        return [Problem(f"{where}.temperature", "0 tries nothing, so nothing can be learned; set it above 0.")]
    said = "leaves tokens out that the policy would have sampled, and training would be wrong by that; remove it."
    return [Problem(f"{where}.{name}", said) for name in narrows(sampling)]


class _Training:
    """One training under way."""

    def __init__(self, trainer: Trainer) -> None:
        self.env, self.config, self.algorithm = trainer.env, trainer.config, trainer.algorithm(trainer.config)
        self._algorithm_class = trainer.algorithm
        self.directory = self.env.book.directory
        self.checkpoints = Checkpoints(self.directory / "checkpoints", self.config.keep)
        ledger = self.env.book.ledger
        self.steps, self.curves = Steps(ledger), Curves(self.config.log, self.directory, ledger.state("id", ""))
        # Torch computes in a thread of its own, so that rollouts go on meanwhile.
        self._thread = ThreadPoolExecutor(1, "learner")
        self._bad = 0
        self._news: WeightUpdate | None = None
        self._examined: int | None = None

    async def run(self) -> None:
        try:
            async with self.env.running():
                learner = await self._in_thread(self._build_learner)
                try:
                    await self._train(learner)
                finally:
                    await self._in_thread(learner.close)
        finally:
            self.curves.close()
            self._thread.shutdown(wait=True)

    async def _train(self, learner: "RunLearner") -> None:
        config, produce = self.config, self.env.produce
        self.env.waits_for_judge = True  # an outage must cost time, not the rollouts that it falls on
        if getattr(config, "dynamic_sampling", False):
            produce = produce.model_copy(update={"filter": "equal_rewards"})
        producer = Producer(self.env, produce, group_size=config.group_size)
        step = await self._restored(learner)
        try:
            await self._publish(producer, learner, step)
            producer.restore(step)  # which begins to sample
            await self._evaluated(step)
            while step < config.steps:
                begun = time.monotonic()
                groups = await producer.batch(config.prompts_per_step, step + 1)
                if not groups:
                    break
                step += 1
                waited = time.monotonic() - begun
                if config.colocated:
                    await self._rest(producer)
                numbers = await self._learn(learner, groups, step, producer.in_flight, producer.discarded)
                await self._publish(producer, learner, step)
                self._note(step, {**numbers, "rollout_s": waited})
                if step % config.checkpoint_every == 0 or step == config.steps or self._failing:
                    await self._checkpoint(learner, step)
                self._give_up(step)
                await self._evaluated(step)
            if step < config.steps and not self.env.book.stopping:
                log.warning("training ends at step %d of %d: its trials are used up", step, config.steps)
                await self._evaluated(step, last=step)
            await self._checkpoint(learner, step)
            await self._in_thread(learner.save, self.directory / "policy")
        finally:
            await producer.pause(0)
            await self._wake()

    async def _rest(self, producer: Producer) -> None:
        """Have the engine rest. What may not go on under new weights is ended before, while it still can."""
        if not producer.config.partial:
            await producer.pause()
        await self.env.publish(WeightUpdate(producer.version, paused=True))

    async def _wake(self) -> None:
        """However training ended, an engine that serves others, too, must not stay paused."""
        if self._news is not None:
            with suppress(LoopwrightError, TimeoutError):
                async with asyncio.timeout(_WAKE_S):
                    await self.env.publish(self._news)

    # -- one step -------------------------------------------------------------------------------------------------

    async def _learn(
        self,
        learner: "RunLearner",
        groups: Sequence[Group],
        step: int,
        in_flight: int = 0,
        discarded: DiscardedGroups | None = None,
    ) -> dict[str, float]:
        """Train on these groups; what there is to tell of it."""
        begun = time.monotonic()
        samples = self._samples(groups, step)
        told: dict[str, float] = {}
        if samples:
            told = await self._in_thread(partial(learner.update, samples, step))
        if not told.get("updates") and not told.get("skipped"):
            log.warning("step %d is skipped: there is nothing to learn from in its %d groups", step, len(groups))
        self._count(step, told)
        seen = _seen(groups, samples, step, discarded or DiscardedGroups())
        return {**seen, **told, "train_s": time.monotonic() - begun, "in_flight": float(in_flight)}

    def _samples(self, groups: Sequence[Group], step: int) -> list[Sample]:
        version = step - 1
        oldest = version - self.env.produce.max_staleness if self.env.produce.staleness == "token" else None
        advantages = []
        for group in groups:
            rewards = {n: e.reward.value for n, e in group.episodes.items() if e.reward is not None}
            counted = frozenset(n for n in rewards if group.episodes[n].in_baseline)
            advantages.append(self.algorithm.advantages(rewards, counted))
        episodes = [group.episodes for group in groups]
        sampled_at = 1.0 if self.env.source is None else self.env.source.sampling.temperature
        return samples_of(
            episodes, advantages, version=version, oldest=oldest, length=self.algorithm.length, temperature=sampled_at
        )

    def _count(self, step: int, told: dict[str, float]) -> None:
        """Steps that came to nothing are said, and counted while they come in a row."""
        if told.get("skipped"):
            what = "part of it was left out" if told["updates"] else "the policy was left as it was"
            log.warning("step %d: a loss or gradient was no finite number; %s", step, what)
        if told.get("updates"):
            self._bad = 0
        elif told.get("skipped"):
            self._bad += 1

    @property
    def _failing(self) -> bool:
        return self._bad >= self.config.bad_steps

    def _give_up(self, step: int) -> None:
        """Too many steps in a row that came to nothing end the training; resumed, it goes on after them."""
        if self._failing:
            raise TrainingFailed(
                f"{self._bad} steps in a row had a loss or gradient that is no finite number, the last one {step}. "
                "Lower `lr`, or look for rewards that are too large."
            )

    async def _publish(self, producer: Producer, learner: "RunLearner", step: int) -> None:
        """Let the engines have the weights of this step, under its number: the first ones too, whatever they hold."""
        weights = await self._in_thread(learner.weights)
        self._news = WeightUpdate(step, weights=weights)
        await producer.update(step, weights)
        self._news = WeightUpdate(step)

    def _note(self, step: int, numbers: dict[str, float]) -> None:
        self._write("train", Step(step, time.time(), numbers))

    async def _evaluated(self, step: int, last: int | None = None) -> None:
        config = self.env.evaluation
        if (
            config is None
            or step == self._examined
            or not config.due(step, self.config.steps if last is None else last)
        ):
            return
        self._examined = step
        groups = self.env.examine(step, config.samples)
        await self.env.roll_all(groups)
        rewards = [[e.reward.value for e in group.episodes.values() if e.reward is not None] for group in groups]
        numbers = summary(rewards, config, seed=f"{self.config.seed}:{step}")
        self._write("eval", Step(step, time.time(), numbers))

    def _write(self, kind: Kind, step: Step) -> None:
        self.steps.add(kind, step)
        self.curves.add(step.step, {f"{kind}/{name}": value for name, value in step.numbers.items()})
        self.env.book.observers.after_step(kind, step)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    async def _checkpoint(self, learner: "RunLearner", step: int) -> None:
        """Have the weights on disk, and then the rollouts that they were learned from count as trained on."""
        await self._in_thread(partial(self.checkpoints.save, step, learner.write))
        self.env.buffer.settle(step)

    async def _restored(self, learner: "RunLearner") -> int:
        """The step that training goes on after. Steps since the last checkpoint are repeated from what was recorded."""
        found = self.checkpoints.latest()
        step = 0
        if found is not None:
            await self._in_thread(learner.read, found.directory)
            step = found.step
        self.steps.forget(step)
        first = step
        while numbers := self.env.buffer.taken(step + 1):
            step += 1
            groups = [self.env.recorded(number, self.config.group_size) for number in numbers]
            self._note(step, await self._learn(learner, groups, step))
        if step > first:
            await self._checkpoint(learner, step)
        self._give_up(step)
        return step

    def _build_learner(self) -> "RunLearner":
        from loopwright.trainers.learners import build_learner

        return build_learner(self.config, self._algorithm_class, self.env)

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Run it where torch computes. A cancelled caller, too, waits for its end: two must never run at once."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            raise


def _seen(
    groups: Sequence[Group], samples: Sequence[Sample], step: int, discarded: DiscardedGroups
) -> dict[str, float]:
    """What the batch itself has to tell, and what was left out of it."""
    episodes = [episode for group in groups for episode in group.episodes.values()]
    rewards = [episode.reward.value for episode in episodes if episode.reward is not None]
    if not rewards:
        return {"episodes": float(len(episodes))}
    wanted = sum(group.trials for group in groups) + discarded.trials
    mean, every = fmean(rewards), rewards + discarded.rewards
    return {
        "reward": mean,
        "reward_std": fmean((reward - mean) ** 2 for reward in rewards) ** 0.5,
        "episodes": float(len(episodes)),
        "trained_episodes": float(len({sample.episode for sample in samples})),
        "tokens": float(sum(sample.tokens for sample in samples)),
        "length": fmean(episode.sampled for episode in episodes),
        "turns": fmean(episode.turns for episode in episodes),
        "staleness": fmean(sample.staleness for sample in samples) if samples else 0.0,
        **({"reward_all": fmean(every)} if discarded.rewards else {}),
        "filtered": float(discarded.groups["filtered"]),
        "failed": float(discarded.groups["failed"]),
        "fault_rate": (wanted - len(every)) / wanted if wanted else 0.0,
        "version": float(step - 1),
    }
