"""Our rollouts for TRL: the loop, engine and judger of a scenario's run, as the `rollout_func` of its `GRPOTrainer`.

    with TrlRollouts("study.toml", output="out/trl") as rollouts:
        GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            args=GRPOConfig(temperature=1.0, num_generations=8, ...),
            train_dataset=rollouts.dataset(),
            rollout_func=rollouts,
            reward_funcs=rollouts.judged,
        ).train()

TRL decides which task comes when, and what is learned; it is given the ids, logprobs and masks that were captured, and
tokenizes nothing. Before it samples, the engine gets the weights of TRL's model, as version `global_step + 1`. Every
rollout is a trial in the ledger.
"""

import asyncio
import json
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self, TypeVar

from loopwright.core.episode import Episode
from loopwright.core.errors import MissingExtra
from loopwright.engines.base import Sampling
from loopwright.engines.weight_update import WeightUpdate
from loopwright.integrations.branch import Branches, one_row
from loopwright.rollouts.env import RolloutEnv
from loopwright.rollouts.group import Group
from loopwright.rollouts.tasks.mix import Prompt
from loopwright.scenario.load import load
from loopwright.scenario.make import environment, select_run
from loopwright.trainers.sample import check_sampling, truncating_parameters

T = TypeVar("T")
_RANK_SEED = 1_000_003
"""How far the seeds of two processes are apart: a group that they share must not have the same answers twice."""


class TrlRollouts:
    """A rollout function, for as long as its context is open.

    `branches` says what becomes of a rollout with several branches, of which TRL can be given one: "refuse" is an
    error; "main" takes the branch with the most sampled tokens and logs the others' as `loopwright/tokens_left_out`.
    """

    def __init__(
        self,
        file: str | Path,
        run: str | None = None,
        output: str | Path | None = None,
        *,
        branches: Branches = "refuse",
    ) -> None:
        self._loaded = load(Path(file))
        config = select_run(self._loaded, run)
        if config.rollout is None or config.agent is None:
            raise ValueError(f"run {config.name!r} of {file} makes no rollouts: it has no [run.rollout]")
        if rank := int(os.environ.get("RANK", "0")):  # one of several processes of torchrun or accelerate
            output = None if output is None else Path(output) / f"rank-{rank}"
            agent = config.agent.model_copy(update={"seed": config.agent.seed + rank * _RANK_SEED})
            config = config.model_copy(update={"agent": agent})
        if output is not None and (Path(output) / "campaign.json").exists():
            raise ValueError(f"{output} has rollouts already. TRL resumes from its own checkpoints: name a new output")
        self._config, self._output, self._branches = config, output, branches
        self._stack = AsyncExitStack()
        # A thread of its own: the main thread of a notebook has a running loop already.
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._published = 0

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._wait(self._open())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    async def _open(self) -> None:
        undo = self._stack.enter_context(ExitStack())
        env = environment(self._loaded, self._config, self._output, undo)
        if not isinstance(env, RolloutEnv) or env.source is None:
            raise TypeError(f"a {type(env).__name__} makes no rollouts that can be trained on")
        self._prompts = _by_words(env.tasks.prompts())
        self._held_out = _by_words(env.tasks.held_out())
        self._source = env.source
        self.env = await self._stack.enter_async_context(env.running())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._wait(self._stack.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def dataset(self, *, held_out: bool = False) -> Any:
        """The run's tasks as TRL reads them, or those of its `[run.eval]`; their labels stay with the judger."""
        try:
            from datasets import Dataset
        except ImportError as error:
            raise MissingExtra("a dataset for TRL", "trl") from error
        prompts = self._held_out if held_out else self._prompts
        tasks = [prompt.task for prompt in prompts.values()]
        return Dataset.from_list([{"prompt": list(task.messages), "task": task.id} for task in tasks])

    # -- what TRL calls -------------------------------------------------------------------------------------------

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """TRL's `rollout_func`: an answer for each prompt, in their order."""
        _check(self._source.sampling, trainer.temperature)
        training, step = trainer.model.training, int(trainer.state.global_step)
        version = step + 1  # 0 are the weights that the engine began with, which are not TRL's
        size = trainer.num_generations if training else trainer.num_generations_eval
        groups = [(self._prompt(one, training), count) for one, count in _runs(prompts, size)]
        weights = self._weights(trainer) if version != self._published else None
        episodes = self._wait(self._rolled(groups, version, weights, None if training else step))
        self._published = version
        for _, one in episodes if training else ():
            check_sampling(one, trainer.temperature)
        answers = [_answer(trial, one, self._branches, trainer) for trial, one in episodes]
        return {name: [answer[name] for answer in answers] for name in answers[0]}

    def judged(
        self,
        *,
        episode_reward: Sequence[float | None],
        left_out: Sequence[int],
        trial: Sequence[int],
        log_extra: Callable[[str, list[Any]], None],
        log_metric: Callable[[str, float], None],
        **_: Any,
    ) -> list[float | None]:
        """TRL's reward function: what the run's judger gave. Where it gave nothing, TRL is told nothing, not zero."""
        log_extra("trial", list(trial))
        log_metric("loopwright/tokens_left_out", float(sum(left_out)))
        log_metric("loopwright/without_reward", episode_reward.count(None) / len(episode_reward))
        return list(episode_reward)

    # -- rollouts -------------------------------------------------------------------------------------------------

    async def _rolled(
        self, groups: Sequence[tuple[Prompt, int]], version: int, weights: Any, examined: int | None
    ) -> list[tuple[int, Episode]]:
        if weights is not None:
            await self.env.publish(WeightUpdate(version, weights=weights))
        env = self.env
        begun = [env.begin(*each) if examined is None else env.examined(each[0], examined, each[1]) for each in groups]
        await env.roll_all(begun)
        for group in begun if examined is None else ():
            self._close(group, version)
        env.book.ledger.flush()
        return [one for group in begun for one in _episodes(group)]

    def _close(self, group: Group, version: int) -> None:
        buffer = self.env.buffer
        if any(episode.in_baseline for episode in group.episodes.values()):
            buffer.ready(group.number, group.version(version))
            buffer.take(1, version)
            buffer.settle(version)  # what becomes of it is TRL's to know
        else:
            buffer.close(group.number, "failed")

    def _prompt(self, prompt: Any, training: bool) -> Prompt:
        words = _words(prompt)
        found = self._prompts.get(words) if training else self._held_out.get(words) or self._prompts.get(words)
        if found is None:
            raise KeyError(
                f"no task of run {self._config.name!r} has this prompt: {prompt!r}. "
                "Train on `dataset()`, evaluate on `dataset(held_out=True)`."
            )
        return found

    def _weights(self, trainer: Any) -> Any:
        """The weights of TRL's model, as the run's engine takes them."""
        from loopwright.trainers.model import save_model, weights_of

        model = trainer.accelerator.unwrap_model(trainer.model)
        hub = model.get_base_model() if hasattr(model, "get_base_model") else model
        if self._source.near:
            return weights_of(hub)
        # In turns, so that an engine that still reads the one before is not disturbed.
        directory = self.env.book.directory / "weights" / str((self._published + 1) % 2)
        save_model(hub, weights_of(hub), directory)
        trainer.processing_class.save_pretrained(directory)
        return str(directory)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """What it gives. Who stops waiting, by Ctrl-C, stops the work."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _episodes(group: Group) -> list[tuple[int, Episode]]:
    """The rollouts of a group by their trials; one that stays lost is an episode of nothing."""
    return [*sorted(group.episodes.items(), key=itemgetter(0)), *[(0, Episode(group.prompt.task))] * group.missing]


def _answer(trial: int, episode: Episode, branches: Branches, trainer: Any) -> dict[str, Any]:
    """An episode in TRL's words. What is not to be trained on is there, and masked."""
    row, left_out = one_row(episode, branches)
    pad = trainer.processing_class.pad_token_id
    # TRL has no word for an answer without tokens: a masked one stands for it.
    completion = list(row.response_ids) if row else [pad]
    mask = list(row.response_mask) if row and episode.trainable else [0] * len(completion)
    return {
        "prompt_ids": list(row.prompt_ids) if row else [pad],
        "completion_ids": completion,
        "logprobs": list(row.logprobs) if row else [0.0],
        "env_mask": mask,
        "episode_reward": None if episode.reward is None else episode.reward.value,
        "reward_parts": dict(episode.rewards),
        "versions": list(row.versions) if row else [-1],
        "left_out": left_out,
        "trial": trial,
    }


def _runs(prompts: Sequence[Any], size: int) -> list[tuple[Any, int]]:
    """The prompts that follow on one another and are alike, at most `size` of them: a group, or this process's part."""
    found = []
    for _, same in groupby(prompts, _words):
        alike = list(same)
        found += [(alike[0], len(alike[start : start + size])) for start in range(0, len(alike), size)]
    return found


def _by_words(prompts: Sequence[Prompt]) -> dict[str, Prompt]:
    """Prompts by what TRL hands back of them, which is their messages alone."""
    found: dict[str, Prompt] = {}
    for prompt in prompts:
        twin = found.setdefault(_words(prompt.task.messages), prompt)
        if twin.task.label != prompt.task.label:
            raise ValueError(
                f"tasks {twin.task.id!r} and {prompt.task.id!r} have the same prompt but other labels; "
                "TRL tells a rollout function the prompt alone. Make their prompts differ."
            )
    return found


def _words(prompt: Sequence[Mapping[str, Any]]) -> str:
    # A table has a null where a message has no such field.
    return json.dumps([{k: v for k, v in each.items() if v is not None} for each in prompt], sort_keys=True)


def _check(sampling: Sampling, temperature: float) -> None:
    """TRL's logprobs must be those of the distribution that was sampled from."""
    if sampling.temperature != temperature:
        raise ValueError(
            f"the loop samples at temperature {sampling.temperature:g}, but TRL computes logprobs at {temperature:g}: "
            f"set GRPOConfig(temperature={sampling.temperature:g})"
        )
    if names := truncating_parameters(sampling):
        raise ValueError(f"the loop's sampling: {', '.join(names)} leaves out tokens that TRL counts; remove it")
