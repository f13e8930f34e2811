"""`Producer`: judged groups of rollouts for a trainer of your own, in your own event loop."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from loopwright.core.errors import LoopwrightError, Problem, ScenarioError
from loopwright.reports.page import write_all
from loopwright.rollouts.config import RolloutAgentConfig
from loopwright.rollouts.env import RolloutEnv
from loopwright.rollouts.group import Group
from loopwright.rollouts.producer import GroupProducer
from loopwright.scenario.dispatch import begin, hold
from loopwright.scenario.kinds.base import BuildContext, LoadedScenario
from loopwright.scenario.kinds.rollout import RolloutRun
from loopwright.scenario.load import load


class Producer:
    """Produces the groups of a scenario's rollout run; training, and when to publish weights, is up to the caller.

        async with loopwright.Producer("study.toml", output="out") as producer:
            while groups := await producer.batch(8):
                await producer.publish(train(groups), producer.version + 1)
                producer.trained(groups)

    Only `group_size`, `min_group`, `seed` and `trials` of the run's agent count; with a trainer as the agent, it does
    not train. Opened again with the same output, it continues: groups that were handed out but not reported by
    `trained` are handed out again, the others never, however the last process ended.
    """

    def __init__(
        self,
        scenario: str | Path | Mapping[str, Any],
        *,
        output: str | Path,
        run: str | None = None,
        set: Mapping[str, Any] | None = None,
    ) -> None:
        self._loaded = load(scenario, set=set)
        self._run = _rollout_run(self._loaded, run)
        self._output = Path(output)
        self._stack = AsyncExitStack()
        self._production: tuple[RolloutEnv, GroupProducer] | None = None
        self._batches: dict[int, frozenset[int]] = {}
        """The groups of each step that were handed out and are not trained yet."""
        self._batch_lock = asyncio.Lock()
        self._step = 0
        self._is_restored = False

    async def __aenter__(self) -> Self:
        try:
            self._production = await self._open()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        env, _ = self._open_production()
        env.book.ledger.set_state("finished", error is None)
        self._production = None
        # It ends even if the caller's task is cancelled meanwhile.
        closing = asyncio.ensure_future(self._stack.aclose())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait({closing})
            raise

    @property
    def version(self) -> int:
        """The newest version that was published, also by an earlier process; 0 if none was."""
        env, _ = self._open_production()
        return int(env.book.ledger.state("version", 0))

    async def batch(self, size: int) -> list[Group]:
        """The next `size` groups to train on; fewer, and in the end none, when the agent's `trials` are used up.

        Production continues between calls if `produce.type` is `async`.
        """
        if size < 1:
            raise ValueError(f"a batch has at least one group, not {size}")
        env, producer = self._open_production()
        async with self._batch_lock:  # each batch has its own step
            self._restore(producer)
            groups = await producer.batch(size, self._step + 1)
            env.book.ledger.flush()
            if groups:
                self._step += 1
                self._batches[self._step] = frozenset(group.number for group in groups)
            return groups

    async def publish(self, weights: Any, version: int) -> None:
        """Give the engine new weights. Groups older than `produce.max_staleness` versions expire.

        Tokens carry the version of the weights that sampled them, so new weights need a number of their own. After a
        restart the engine has its first weights again: publish those of your checkpoint before the first `batch`, with
        the version that they had.
        """
        env, producer = self._open_production()
        newest = self.version
        if version <= newest and self._is_restored:
            raise ValueError(f"version {version} is in use; new weights need version {newest + 1} or later")
        # Before any token is sampled with them: a crash must not give the same number to other weights.
        env.book.ledger.set_state("version", max(version, newest))
        env.book.ledger.flush()
        await producer.update(version, weights)
        self._restore(producer)

    def trained(self, groups: Sequence[Group]) -> None:
        """Record that these groups are trained on: whole batches, the oldest first. They are never handed out again.

        Call it after your own checkpoint, so that a crash in between repeats them instead of losing them.
        """
        env, _ = self._open_production()
        numbers, last = {group.number for group in groups}, 0
        for step, batch in self._batches.items():
            if not batch <= numbers:
                break
            numbers, last = numbers - batch, step
        if numbers or not last:
            raise ValueError(
                f"groups {sorted(numbers)} are not one whole batch that is not trained yet, the oldest first. "
                "Pass what `batch` returned."
            )
        env.book.ledger.set_state("step", last)
        env.buffer.settle(last)
        env.book.ledger.flush()
        self._batches = {step: batch for step, batch in self._batches.items() if step > last}

    async def _open(self) -> tuple[RolloutEnv, GroupProducer]:
        stack, output, config = self._stack, self._output, self._run.agent
        if not isinstance(config, RolloutAgentConfig):
            problem = Problem("[run.agent]", "must have a group_size, as `collect` does.")
            raise ScenarioError(self._loaded.label, [problem])
        stack.enter_context(hold(output))
        if not (output / "campaign.json").exists():
            begin(self._loaded, output)
        stack.callback(write_all, output)
        resources = stack.enter_context(ExitStack())
        context = BuildContext(self._loaded, output, config, resources, agent_class=self._run.agent_class)
        env = self._run.build_env(context)
        await stack.enter_async_context(env.running())
        producer = GroupProducer(env, env.produce, group_size=config.group_size, min_group=config.min_size)
        stack.push_async_callback(producer.pause, 0.0)
        self._step = int(env.book.ledger.state("step", 0))
        self._batches, self._is_restored = {}, False
        return env, producer

    def _restore(self, producer: GroupProducer) -> None:
        """Continue what an earlier process left; not before the caller could publish the weights to do it with."""
        if not self._is_restored:
            self._is_restored = True
            producer.restore(self._step)

    def _open_production(self) -> tuple[RolloutEnv, GroupProducer]:
        if self._production is None:
            raise LoopwrightError("this Producer is not open; use it inside `async with`")
        return self._production


def _rollout_run(loaded: LoadedScenario, name: str | None) -> RolloutRun:
    runs = [run for run in loaded.runs if isinstance(run, RolloutRun) and name in (None, run.name)]
    if len(runs) != 1:
        names = ", ".join(run.name for run in loaded.runs if isinstance(run, RolloutRun)) or "none"
        problem = Problem("[[run]]", f"choose one run with [run.rollout] by its name, `run=…`. There are: {names}.")
        raise ScenarioError(loaded.label, [problem])
    return runs[0]
