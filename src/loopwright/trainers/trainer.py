"""The base of all trainers: produce, learn, publish, write down; again until the steps are done."""

import asyncio
import logging
import time
import traceback
from abc import ABC
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import StatisticsError, correlation, fmean
from typing import TYPE_CHECKING, Any, ClassVar

from loopwright.core.agent import Agent
from loopwright.core.config import overridden
from loopwright.core.episode import Episode
from loopwright.core.errors import LoopwrightError, MissingExtra, Problem, StorageError, sentence
from loopwright.core.outcome import Outcome
from loopwright.core.runtime import run
from loopwright.engines.base import Sampling
from loopwright.engines.inprocess.engine import finish_in_thread
from loopwright.engines.weight_update import WeightUpdate
from loopwright.ledger.steps import Kind, Step, Steps, steps
from loopwright.reports.curves import Curves, missing_packages
from loopwright.reports.rollout.tokens import tokenizer_of
from loopwright.reports.training.digest import describe_cuts
from loopwright.reports.training.model_card import model_card
from loopwright.rollouts.config import RolloutConfig
from loopwright.rollouts.env import RolloutEnv
from loopwright.rollouts.evaluation import rewards_by_kind, summary
from loopwright.rollouts.group import DiscardedGroups, Group
from loopwright.rollouts.producer import GroupProducer
from loopwright.trainers.algorithm import Algorithm
from loopwright.trainers.checkpoint import Checkpoints
from loopwright.trainers.config import TrainConfig
from loopwright.trainers.export.policy_files import complete_policy
from loopwright.trainers.failure import TrainingFailed
from loopwright.trainers.sample import Sample, build_samples, truncating_parameters

if TYPE_CHECKING:
    from loopwright.trainers.learners import LocalLearner
    from loopwright.trainers.learners_ray import RayLearner

    RunLearner = LocalLearner | RayLearner

log = logging.getLogger(__name__)
_WAKE_S = 10.0
_NGRAM = 4


class Trainer(Agent, ABC):
    """Trains a policy on its own rollouts. Checkpoints hold the policy, the ledger the rollouts it was trained on.

    A step is atomic: rollouts are assigned to it, the weights change, the checkpoint is on disk, and only then do the
    rollouts count as trained on. A killed run repeats the steps after its last checkpoint from recorded rollouts.
    """

    gives_weights: ClassVar[bool] = True
    algorithm: ClassVar[type[Algorithm]]
    env: RolloutEnv
    config: TrainConfig

    @classmethod
    def problems(cls, config: TrainConfig, space: Any, scenario_dir: Path) -> list[Problem]:
        needed = {"torch": "train", "transformers": "train", **({"peft": "train"} if config.lora else {})}
        if config.workers:
            needed["ray"] = "ray"
        missing = [(name, extra) for name, extra in needed.items() if find_spec(name) is None]
        problems = [
            Problem("type", str(MissingExtra(f"agent {config.type!r} ({name})", extra)))
            for extra, name in {extra: name for name, extra in reversed(missing)}.items()
        ]
        problems += [Problem("log", f"needs: pip install {package}") for package in missing_packages(config.log)]
        if isinstance(space, RolloutConfig):
            problems += _sampling_problems("[run.rollout] loop.sampling", space.loop.sampling, space.loop.sampling)
            for each in space.settings().values():
                own = overridden(each.loop.sampling, each.sampling)
                if own != space.loop.sampling:
                    problems += _sampling_problems(f"[run.rollout] {each.key}, sampling", own, space.loop.sampling)
        return problems

    def run(self) -> int:
        """Train; returns 1 if that failed, so that the other runs of the scenario continue."""
        ledger = self.env.book.ledger
        ledger.set_state("failure", None)
        try:
            run(self.env.book.until_stopped(_Training(self).run()))
        except StorageError:
            raise
        except LoopwrightError as error:
            log.error("%s Then continue with `loopwright resume`: nothing that was recorded is lost.", sentence(error))
            ledger.set_state("failure", str(error))
            return 1
        except Exception as error:
            log.exception("training of run %r failed; continue with `loopwright resume`", self.env.book.name)
            ledger.set_state("failure", "".join(traceback.format_exception(error)))
            return 1
        return 0


def _sampling_problems(where: str, sampling: Sampling, trained: Sampling) -> list[Problem]:
    """What keeps rollouts that are sampled like this from being trained on, at the temperature of the run's loop."""
    if sampling.temperature == 0:
        return [Problem(f"{where}.temperature", "with 0 there is nothing to learn; set it above 0.")]
    if sampling.temperature != trained.temperature:
        text = f"is {sampling.temperature:g}, but the policy is trained at {trained.temperature:g}"
        return [Problem(f"{where}.temperature", f"{text}, the temperature of the run's loop; use the same.")]
    reason = "changes which tokens the policy samples, so training would be biased; remove it."
    return [Problem(f"{where}.{name}", reason) for name in truncating_parameters(sampling)]


class _Training:
    """One training run in progress."""

    def __init__(self, trainer: Trainer) -> None:
        self.env, self.config, self.algorithm = trainer.env, trainer.config, trainer.algorithm(trainer.config)
        self._algorithm_class = trainer.algorithm
        self.directory = self.env.book.directory
        self.checkpoints = Checkpoints(self.directory / "checkpoints", self.config.keep)
        ledger = self.env.book.ledger
        self.steps, self.curves = Steps(ledger), Curves(self.config.log, self.directory, ledger.state("id", ""))
        # Torch computes in a separate thread, so that rollouts continue meanwhile.
        self._thread = ThreadPoolExecutor(1, "learner")
        self._in_thread = partial(finish_in_thread, self._thread)
        self._failed_steps = 0
        self._last_update: WeightUpdate | None = None
        self._evaluated_step: int | None = None

    async def run(self) -> None:
        try:
            async with self.env.running():
                learner: RunLearner = await self._in_thread(self._build_learner)
                try:
                    await self._train(learner)
                finally:
                    await self._in_thread(learner.close)
        finally:
            self.curves.close()
            self._thread.shutdown(wait=True)

    async def _train(self, learner: "RunLearner") -> None:
        config, produce = self.config, self.env.produce
        self.env.wait_for_judger = True  # an outage of the judger must cost time, not rollouts
        if getattr(config, "dynamic_sampling", False):
            produce = produce.model_copy(update={"filter": "equal_rewards"})
        producer = GroupProducer(self.env, produce, group_size=config.group_size, min_group=config.min_size)
        try:
            await self._repeat_evaluations(producer, learner)
            step = await self._resume(learner)
            await self._publish(producer, learner, step)
            await self._evaluate(step)  # before production starts, which would compete with it
            producer.restore(step)
            while step < config.steps:
                start = time.monotonic()
                groups = await producer.batch(config.prompts_per_step, step + 1, config.steps)
                if not groups:
                    break
                step += 1
                rollout_s = time.monotonic() - start
                if config.colocated:
                    await producer.pause_for_update()
                    await self.env.publish(WeightUpdate(producer.version, paused=True))
                metrics = await self._learn(learner, groups, step, producer.in_flight, producer.discarded)
                await self._publish(producer, learner, step)
                self._record(step, {**metrics, "rollout_s": rollout_s})
                if step % config.checkpoint_every == 0 or step == config.steps or self._failing:
                    await self._checkpoint(learner, step)
                self._stop_if_failing(step)
                await self._evaluate(step)
            if step < config.steps and not self.env.book.stopping:
                log.warning("training stopped at step %d of %d: trial budget exhausted", step, config.steps)
                await self._evaluate(step, last=step)
            await self._checkpoint(learner, step)
            await self._in_thread(learner.save, self.directory / "policy")
            policy, source, checkpoint = self.directory / "policy", self.env.source, self.checkpoints.latest()
            if policy.is_dir() and source is not None and checkpoint is not None:
                card = model_card(self.env.book.ledger, config.model or source.engine.policy or "unknown")
                complete_policy(policy, source.engine, source.sampling.temperature, checkpoint[1], card)
        finally:
            await producer.pause(0)
            # However training ended, an engine that others use must not stay paused.
            if self._last_update is not None:
                with suppress(LoopwrightError, TimeoutError):
                    async with asyncio.timeout(_WAKE_S):
                        await self.env.publish(self._last_update)

    # -- one step -------------------------------------------------------------------------------------------------

    async def _learn(
        self,
        learner: "RunLearner",
        groups: Sequence[Group],
        step: int,
        in_flight: int = 0,
        discarded: DiscardedGroups | None = None,
    ) -> dict[str, float]:
        """Train on these groups; returns the metrics of the step."""
        start = time.monotonic()
        samples = self._samples(groups, step)
        metrics = {"trained_episodes": 0.0, "tokens": 0.0}
        if samples:
            metrics = await self._in_thread(learner.update, samples, step)
        if not metrics.get("updates") and not metrics.get("skipped"):
            log.warning("step %d skipped: there is nothing to learn from its %d groups", step, len(groups))
        self._count_failures(step, metrics)
        batch = _batch_metrics(groups, samples, step, discarded or DiscardedGroups())
        batch |= monitor([episode for group in groups for episode in group.episodes.values()], self._control_ids)
        return {**batch, **metrics, "train_s": time.monotonic() - start, "in_flight": float(in_flight)}

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        """The special tokens of the policy; none if its tokenizer is unknown."""
        source = self.env.source
        tokenizer = None if source is None else tokenizer_of(source.engine.model_dump(mode="json"), self.directory)
        return frozenset() if tokenizer is None else frozenset(tokenizer.specials.values())

    def _samples(self, groups: Sequence[Group], step: int) -> list[Sample]:
        version = step - 1
        advantages, oldest = [], list[int | None]()
        for group in groups:
            produce = overridden(self.env.produce, self.env.runner(group.prompt.source).produce)
            oldest.append(version - produce.max_staleness if produce.staleness == "token" else None)
            rewards = {n: e.reward.value for n, e in group.episodes.items() if e.reward is not None}
            baseline = frozenset(n for n in rewards if group.episodes[n].in_baseline)
            advantages.append(self.algorithm.advantages(rewards, baseline))
        episodes = [group.episodes for group in groups]
        temperature = 1.0 if self.env.source is None else self.env.source.sampling.temperature
        return build_samples(
            episodes, advantages, version=version, oldest=oldest, length=self.algorithm.length, temperature=temperature
        )

    def _count_failures(self, step: int, metrics: dict[str, float]) -> None:
        """Log non-finite losses and gradients, and count the steps in a row without an update."""
        if metrics.get("skipped"):
            effect = "part of the batch was skipped" if metrics["updates"] else "the policy was not updated"
            log.warning("step %d: non-finite loss or gradient; %s", step, effect)
        if metrics.get("updates"):
            self._failed_steps = 0
        elif metrics.get("skipped"):
            self._failed_steps += 1

    @property
    def _failing(self) -> bool:
        return self._failed_steps >= self.config.bad_steps

    def _stop_if_failing(self, step: int) -> None:
        """Raise TrainingFailed after too many failed steps in a row; a resumed run continues after them."""
        if self._failing:
            raise TrainingFailed(
                f"{self._failed_steps} steps in a row, up to step {step}, had a non-finite loss or gradient. "
                "Lower `lr`, or check for rewards that are too large."
            )

    async def _publish(self, producer: GroupProducer, learner: "RunLearner", step: int) -> None:
        """Load the weights of this step into the engines, with the step as their version; also those of step 0."""
        weights = await self._in_thread(learner.weights)
        self._last_update = WeightUpdate(step, weights=weights)
        await producer.update(step, weights)
        self._last_update = WeightUpdate(step)

    def _record(self, step: int, metrics: dict[str, float]) -> None:
        self._write("train", Step(step, time.time(), metrics))

    async def _evaluate(self, step: int, last: int | None = None) -> None:
        config = self.env.evaluation
        if (
            config is None
            or step == self._evaluated_step
            or not config.due(step, self.config.steps if last is None else last)
        ):
            return
        self._evaluated_step = step
        earlier: Mapping[str, Any] = next(
            (each.numbers for each in steps(self.env.book.ledger, "eval") if each.step == step), {}
        )
        repeat = int(earlier.get("repeats", 0)) + bool(earlier.get("unreliable"))
        groups = self.env.open_evaluation(step, config.samples, repeat)
        await self.env.roll_all(groups)
        rewards = [[e.reward.value for e in group.episodes.values() if e.reward is not None] for group in groups]
        cuts = sum(e.is_cut for group in groups for e in group.episodes.values() if e.reward is not None)
        seed = f"{self.config.seed}:{step}"
        numbers = summary(rewards, config, seed=seed, cuts=cuts) | rewards_by_kind(groups, seed=seed)
        if numbers.get("unreliable"):
            log.warning("the evaluation after step %d is unreliable: %s", step, describe_cuts(numbers))
        self._write("eval", Step(step, time.time(), numbers | ({"repeats": repeat} if repeat else {})))

    async def _repeat_evaluations(self, producer: GroupProducer, learner: "RunLearner") -> None:
        """Repeat unreliable evaluations of an earlier process, as far as there still are weights of their steps."""
        if self.env.evaluation is None:
            return
        for step in [each.step for each in steps(self.env.book.ledger, "eval") if each.numbers.get("unreliable")]:
            if step and step not in self.checkpoints.steps():
                continue
            if step:  # the learner begins with the initial weights
                await self._in_thread(learner.read, self.checkpoints.find(step))
            await self._publish(producer, learner, step)
            await self._evaluate(step, last=step)

    def _write(self, kind: Kind, step: Step) -> None:
        self.steps.add(kind, step)
        self.curves.add(step.step, {f"{kind}/{name}": value for name, value in step.numbers.items()})
        self.env.book.observers.notify("after_step", kind, step)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    async def _checkpoint(self, learner: "RunLearner", step: int) -> None:
        """Write a checkpoint; after that, the rollouts of the step count as trained on."""
        await self._in_thread(self.checkpoints.save, step, learner.write)
        self.env.buffer.settle(step)

    async def _resume(self, learner: "RunLearner") -> int:
        """Restore the last checkpoint and repeat later steps from recorded rollouts; returns the last step."""
        step = 0
        if (checkpoint := self.checkpoints.latest()) is not None:
            step, directory = checkpoint
            await self._in_thread(learner.read, directory)
        self.steps.forget(step)
        first = step
        while numbers := self.env.buffer.groups_of_step(step + 1):
            step += 1
            groups = [self.env.load_group(number, self.config.group_size) for number in numbers]
            self._record(step, await self._learn(learner, groups, step))
        if step > first:
            await self._checkpoint(learner, step)
        self._stop_if_failing(step)
        return step

    def _build_learner(self) -> "RunLearner":
        """Torch and Ray are imported here, in the thread that uses them."""
        from loopwright.trainers.learners import LocalLearner, learner_settings, source_of

        config, book = self.config, self.env.book
        settings = learner_settings(config, self._algorithm_class, self.env)
        if config.workers:
            from loopwright.trainers.learners_ray import RayLearner

            directory = book.directory.absolute()
            return RayLearner(settings, directory, workers=config.workers, cpus=config.cpus, gpus=config.gpus)
        return LocalLearner(settings, book.directory, in_process=source_of(self.env).in_process)


def _batch_metrics(
    groups: Sequence[Group], samples: Sequence[Sample], step: int, discarded: DiscardedGroups
) -> dict[str, float]:
    """Metrics of the batch itself, and of the groups that were discarded for it."""
    episodes = [episode for group in groups for episode in group.episodes.values()]
    rewards = [episode.reward.value for episode in episodes if episode.reward is not None]
    if not rewards:
        return {"episodes": float(len(episodes))}
    trials = sum(group.trials for group in groups) + discarded.trials
    mean, all_rewards = fmean(rewards), rewards + discarded.rewards
    return {
        "reward": mean,
        "reward_std": fmean((reward - mean) ** 2 for reward in rewards) ** 0.5,
        "episodes": float(len(episodes)),
        "length": fmean(episode.sampled for episode in episodes),
        "turns": fmean(episode.turns for episode in episodes),
        "staleness": fmean(sample.staleness for sample in samples) if samples else 0.0,
        **({"reward_all": fmean(all_rewards)} if discarded.rewards else {}),
        "filtered": float(discarded.groups["filtered"]),
        "failed": float(discarded.groups["failed"]),
        "short": float(discarded.groups["short"]),
        "fault_rate": (trials - len(all_rewards)) / trials if trials else 0.0,
        "version": float(step - 1),
    }


def monitor(episodes: Sequence[Episode], control_ids: AbstractSet[int]) -> dict[str, float]:
    """Signs of reward hacking in a batch, which reports watch; those that cannot be computed are missing."""
    scored = [(episode, episode.reward.value) for episode in episodes if episode.reward is not None]
    if not scored:
        return {}
    numbers = {"truncation_rate": fmean(episode.outcome is Outcome.TRUNCATED for episode, _ in scored)}
    with suppress(StatisticsError):  # all lengths or all rewards are equal, or there is one rollout
        numbers["length_reward"] = correlation([float(e.sampled) for e, _ in scored], [reward for _, reward in scored])
    nodes = [node for episode, _ in scored for node in episode.nodes if node.spans]
    turns = [[token for span in node.spans for token in node.ids[span.start : span.stop]] for node in nodes]
    if tokens := sum(map(len, turns)):
        if control_ids:
            # The last token of a turn ends it, as it should.
            numbers["control_rate"] = sum(token in control_ids for turn in turns for token in turn[:-1]) / tokens
        ngrams = [[tuple(turn[i : i + _NGRAM]) for i in range(len(turn) - _NGRAM + 1)] for turn in turns]
        if count := sum(map(len, ngrams)):
            numbers["repetition"] = 1 - sum(len({*each}) for each in ngrams) / count
    return numbers
