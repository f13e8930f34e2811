"""Rollouts for TRL: the loop, engine and judger of a scenario's run, as the `rollout_func` of a `GRPOTrainer`.

    with TrlRollouts("study.toml", output="out/trl") as rollouts:
        GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            args=GRPOConfig(temperature=1.0, num_generations=8, ...),
            train_dataset=rollouts.dataset(),
            rollout_func=rollouts,
            reward_funcs=rollouts.judged,
        ).train()

TRL picks the tasks and trains. It gets the captured ids, logprobs and masks, so nothing is tokenized again. Before
sampling, the engine loads the weights of TRL's model, as version `global_step + 1`. Every rollout is a trial in the
ledger.
"""

import asyncio
import json
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self, TypeVar

from loopwright.core.episode import Episode
from loopwright.core.errors import MissingExtra
from loopwright.engines.base import Sampling
from loopwright.engines.named_tokenizer import model_location
from loopwright.engines.weight_update import WeightUpdate
from loopwright.gateway.audit import CHECKPOINTS, ExternalCheckpoints
from loopwright.integrations.branch import Branches, one_row
from loopwright.rollouts.env import RolloutEnv
from loopwright.rollouts.group import Group
from loopwright.rollouts.tasks.mix import Prompt
from loopwright.scenario.load import load
from loopwright.scenario.make import environment, select_run
from loopwright.trainers.sample import check_sampling, truncating_parameters

T = TypeVar("T")
_RANK_SEED = 1_000_003
"""The distance between the seeds of two processes, so that a group that they share has different answers."""


class TrlRollouts:
    """A rollout function for TRL; use it as a context manager.

    TRL accepts one branch per rollout. A rollout with several is masked (`branches = "mask"`), represented by the
    branch with the most sampled tokens ("main"), or an error ("refuse"). The number of sampled tokens that are not
    trained on because of that is logged as `loopwright/tokens_left_out`.
    """

    def __init__(
        self,
        file: str | Path,
        run: str | None = None,
        output: str | Path | None = None,
        *,
        branches: Branches = "mask",
    ) -> None:
        self._loaded = load(Path(file))
        config = select_run(self._loaded, run)
        if config.rollout is None or config.agent is None:
            raise ValueError(f"run {config.name!r} of {file} has no [run.rollout]")
        if rank := int(os.environ.get("RANK", "0")):  # one of several processes of torchrun or accelerate
            output = None if output is None else Path(output) / f"rank-{rank}"
            agent = config.agent.model_copy(update={"seed": config.agent.seed + rank * _RANK_SEED})
            config = config.model_copy(update={"agent": agent})
        if output is not None and (Path(output) / "campaign.json").exists():
            raise ValueError(f"{output} already has rollouts. TRL resumes from its own checkpoints: use a new output")
        self._config, self._output, self._branches = config, output, branches
        self._stack = AsyncExitStack()
        # In a separate thread: the main thread of a notebook already runs an event loop.
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
            raise TypeError(f"a {type(env).__name__} has no rollouts to train on")
        self._prompts = _by_key(env.tasks.prompts())
        self._held_out = _by_key(env.tasks.held_out())
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
        """The run's tasks, or those of its `[run.eval]`, as a dataset for TRL. Labels stay with the judger."""
        try:
            from datasets import Dataset
        except ImportError as error:
            raise MissingExtra("a dataset for TRL", "trl") from error
        prompts = self._held_out if held_out else self._prompts
        tasks = [prompt.task for prompt in prompts.values()]
        return Dataset.from_list([{"prompt": list(task.messages), "task": task.id} for task in tasks])

    @property
    def model_path(self) -> str:
        """Where the engine's own model is, for TRL to start from: a directory, or a name on the hub."""
        model = self._source.engine.policy
        if model is None:
            raise ValueError(f"the model of engine {self._source.engine.type!r} is unknown: give TRL's model yourself")
        return model_location(model, self._source.scenario_dir)

    # -- called by TRL --------------------------------------------------------------------------------------------

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """TRL's `rollout_func`: one answer per prompt, in order."""
        _check_sampling(self._source.sampling, trainer.temperature)
        training, step = trainer.model.training, int(trainer.state.global_step)
        version = step + 1  # 0 is the engine's initial weights, which are not TRL's
        size = trainer.num_generations if training else trainer.num_generations_eval
        groups = [(self._prompt(prompt, training), count) for prompt, count in _groups(prompts, size)]
        weights = self._weights(trainer) if version != self._published else None
        if not self._published:
            self._record_checkpoints(trainer)
        episodes = self._wait(self._roll(groups, version, weights, None if training else step))
        self._published = version
        for _, episode in episodes if training else ():
            check_sampling(episode, trainer.temperature)
        answers = [_answer(trial, episode, self._branches, trainer) for trial, episode in episodes]
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
        """TRL's reward function: the rewards of the run's judger. A missing reward is None, not zero."""
        log_extra("trial", list(trial))
        log_metric("loopwright/tokens_left_out", float(sum(left_out)))
        log_metric("loopwright/without_reward", episode_reward.count(None) / len(episode_reward))
        return list(episode_reward)

    # -- rollouts -------------------------------------------------------------------------------------------------

    async def _roll(
        self, prompts: Sequence[tuple[Prompt, int]], version: int, weights: Any, eval_step: int | None
    ) -> list[tuple[int, Episode]]:
        if weights is not None:
            await self.env.publish(WeightUpdate(version, weights=weights))
        env = self.env
        if eval_step is None:
            groups = [env.open_group(prompt, count) for prompt, count in prompts]
        else:
            groups = [env.open_evaluation_group(prompt, eval_step, count) for prompt, count in prompts]
        await env.roll_all(groups)
        for group in groups if eval_step is None else ():
            self._close(group, version)
        env.book.ledger.flush()
        episodes: list[tuple[int, Episode]] = []
        for group in groups:  # a rollout that stays lost is an empty episode
            episodes += sorted(group.episodes.items(), key=itemgetter(0))
            episodes += [(0, Episode(group.prompt.task))] * group.missing
        return episodes

    def _close(self, group: Group, version: int) -> None:
        buffer = self.env.buffer
        if any(episode.in_baseline for episode in group.episodes.values()):
            buffer.ready(group.number, group.version(version))
            buffer.take(1, version)
            buffer.settle(version)  # the rest is up to TRL
        else:
            buffer.close(group.number, "failed")

    def _prompt(self, prompt: Any, training: bool) -> Prompt:
        key = _prompt_key(prompt)
        task_prompt = self._prompts.get(key) if training else self._held_out.get(key) or self._prompts.get(key)
        if task_prompt is None:
            raise KeyError(
                f"no task of run {self._config.name!r} has this prompt: {prompt!r}. "
                "Train on `dataset()`, evaluate on `dataset(held_out=True)`."
            )
        return task_prompt

    def _weights(self, trainer: Any) -> Any:
        """The weights of TRL's model, in the form that the run's engine loads."""
        from loopwright.trainers.model import save_model, weights_of

        model = trainer.accelerator.unwrap_model(trainer.model)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        if self._source.in_process:
            return weights_of(base)
        # Alternate between two directories: an engine may still be reading the last one.
        directory = self.env.book.directory / "weights" / str((self._published + 1) % 2)
        save_model(base, weights_of(base), directory)
        trainer.processing_class.save_pretrained(directory)
        return str(directory)

    def _record_checkpoints(self, trainer: Any) -> None:
        """Let `loopwright audit` find the weights of each version: TRL's `checkpoint-N` samples as version N + 1."""
        model = getattr(trainer.accelerator.unwrap_model(trainer.model), "name_or_path", None)
        policy = self._source.engine.policy
        is_own = policy is not None and model == model_location(policy, self._source.scenario_dir)
        directory = Path(trainer.args.output_dir).absolute()
        places = ExternalCheckpoints(str(directory), offset=1, initial_version=1 if is_own else None)
        self.env.book.ledger.set_state(CHECKPOINTS, asdict(places))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine in the other thread. Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _answer(trial: int, episode: Episode, branches: Branches, trainer: Any) -> dict[str, Any]:
    """An episode in TRL's format. Tokens that must not be trained on are masked."""
    row, left_out = one_row(episode, branches)
    pad = trainer.processing_class.pad_token_id
    # TRL cannot represent an answer without tokens: use a masked one.
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


def _groups(prompts: Sequence[Any], size: int) -> list[tuple[Any, int]]:
    """Consecutive equal prompts and their number, at most `size`: a group, or this process's part of one."""
    groups = []
    for _, equal in groupby(prompts, _prompt_key):
        copies = list(equal)
        groups += [(copies[0], len(copies[start : start + size])) for start in range(0, len(copies), size)]
    return groups


def _by_key(prompts: Sequence[Prompt]) -> dict[str, Prompt]:
    """Prompts by their messages, which is all that TRL passes to a rollout function."""
    by_key: dict[str, Prompt] = {}
    for prompt in prompts:
        twin = by_key.setdefault(_prompt_key(prompt.task.messages), prompt)
        if twin.task.label != prompt.task.label:
            raise ValueError(
                f"tasks {twin.task.id!r} and {prompt.task.id!r} have the same prompt but different labels; "
                "TRL passes only the prompt to a rollout function. Make their prompts differ."
            )
    return by_key


def _prompt_key(prompt: Sequence[Mapping[str, Any]]) -> str:
    # A dataset has a null where a message lacks a field.
    return json.dumps([{k: v for k, v in each.items() if v is not None} for each in prompt], sort_keys=True)


def _check_sampling(sampling: Sampling, temperature: float) -> None:
    """ValueError unless TRL computes logprobs of the distribution that was sampled from."""
    if sampling.temperature != temperature:
        raise ValueError(
            f"the loop samples at temperature {sampling.temperature:g}, but TRL computes logprobs at {temperature:g}: "
            f"set GRPOConfig(temperature={sampling.temperature:g})"
        )
    if names := truncating_parameters(sampling):
        raise ValueError(f"the loop's sampling: {', '.join(names)} changes what TRL computes without it; remove it")
