"""The contract of every agent loop, as tests.

    class TestMine(LoopContract):
        replies = ("first answer", "second answer")

        def make_config(self, directory: Path, **settings: Any) -> LoopConfig:
            return MineConfig(style="short", **settings)

The policy is a scripted engine that gives one of `replies` in each turn, token by token.
"""
# ruff: noqa: S101  These are tests.

import asyncio
import pickle
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import pytest

from loopwright.core.episode import Episode
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.registry import config_parser
from loopwright.core.task import Task
from loopwright.engines.base import Chunk, EngineError, Sampling
from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine
from loopwright.rollouts.loops.base import LoopConfig, agent_loop, loops
from loopwright.rollouts.loops.worker import LoopWorker, RolloutRequest, WeightUpdate
from loopwright.testing.executors import use_and_close

T = TypeVar("T")


class RecordingEngine(ScriptedEngine):
    """A scripted engine that records its prompts and its tokens, to compare them with the episode."""

    def __init__(self, config: ScriptedConfig, directory: Path) -> None:
        super().__init__(config, directory)
        self.calls: list[tuple[tuple[int, ...], list[int]]] = []
        """For each stream, the ids that it was given and those that it gave."""
        self.started = asyncio.Event()
        self.running = 0
        self.fails = False
        """Whether streams break off after their first chunk."""

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        sampled: list[int] = []
        self.calls.append((tuple(ids), sampled))
        self.started.set()
        self.running += 1
        try:
            async with aclosing(super().generate(ids, sampling, seed=seed)) as stream:
                async for chunk in stream:
                    sampled += chunk.ids
                    yield chunk
                    if self.fails:
                        raise EngineError("the engine died")
        finally:
            self.running -= 1


class LoopContract(ABC):
    """Subclass it, name the subclass `Test…`, and give it a config."""

    replies: tuple[str, ...] = ("yes", "no")
    """What the policy says, one of these each time."""
    task = Task("t", ({"role": "user", "content": "Is it?"},), "yes")
    """What it is asked to do."""

    @abstractmethod
    def make_config(self, directory: Path, **settings: Any) -> LoopConfig:
        """The loop's config, with these settings."""

    def use(
        self,
        directory: Path,
        body: Callable[[LoopWorker, RecordingEngine], Awaitable[T]],
        *,
        engine: dict[str, Any] | None = None,
        **settings: Any,
    ) -> T:
        """Run `body` with the loop and an engine in an event loop, and close both."""
        config = self.make_config(directory, **settings)
        policy = RecordingEngine(ScriptedConfig(replies=self.replies, **(engine or {})), directory)
        return use_and_close(lambda: LoopWorker(agent_loop(config, directory), policy), lambda one: body(one, policy))

    def request(self, seed: str = "0") -> RolloutRequest:
        """A request for a rollout."""
        return RolloutRequest(self.task, seed)

    def test_an_episode_holds_exactly_the_tokens_of_the_engine(self, tmp_path: Path) -> None:
        """In each turn, and each sampled token is trained on once."""

        async def body(worker: LoopWorker, engine: RecordingEngine) -> None:
            for seed in "abcdef":
                engine.calls.clear()
                episode = await worker.handle(self.request(seed))
                assert episode.task == self.task
                assert episode.fault in (None, Fault.POLICY), episode.reason
                check_recorded(episode, engine)

        self.use(tmp_path, body)

    def test_the_same_seed_gives_the_same_episode(self, tmp_path: Path) -> None:
        """Alone, or with others at the same time."""

        async def body(worker: LoopWorker, _: RecordingEngine) -> None:
            together = await asyncio.gather(*(worker.handle(self.request(str(n))) for n in range(6)))
            for n, episode in enumerate(together):
                assert (await worker.handle(self.request(str(n)))).nodes == episode.nodes

        self.use(tmp_path, body)

    def test_an_engine_failure_is_not_the_policys_fault(self, tmp_path: Path) -> None:
        """The outcome is `lost`, and the episode keeps the tokens sampled so far."""

        async def body(worker: LoopWorker, engine: RecordingEngine) -> None:
            engine.fails = True
            episode = await worker.handle(self.request())
            assert (episode.outcome, episode.fault) == (Outcome.LOST, Fault.INFRA)
            check_recorded(episode, engine)

        self.use(tmp_path, body)

    def test_a_spent_budget_is_the_policys_fault(self, tmp_path: Path) -> None:
        """Otherwise it would learn to avoid bad scores by long answers."""

        async def body(worker: LoopWorker, engine: RecordingEngine) -> None:
            episode = await worker.handle(self.request())
            result = (episode.outcome, episode.fault)
            assert result == (Outcome.TRUNCATED, Fault.POLICY), 'the last turn\'s `finish` is "length"'
            assert episode.sampled <= 1
            check_recorded(episode, engine)

        self.use(tmp_path, body, max_tokens=1)

    def test_cancelling_ends_it_with_its_streams(self, tmp_path: Path) -> None:
        """The caller gets a CancelledError, and the engine is free."""

        async def body(worker: LoopWorker, engine: RecordingEngine) -> None:
            flight = asyncio.ensure_future(worker.handle(self.request()))
            await engine.started.wait()
            flight.cancel()
            with pytest.raises(asyncio.CancelledError):
                await flight
            assert engine.running == 0

        self.use(tmp_path, body, engine={"delay_s": 30.0})

    def test_it_continues_after_a_weight_update(self, tmp_path: Path) -> None:
        """In the middle of a turn, and each token carries the version that sampled it."""

        async def body(worker: LoopWorker, engine: RecordingEngine) -> None:
            flight = asyncio.ensure_future(worker.handle(self.request()))
            await engine.started.wait()
            await worker.apply_update(WeightUpdate(3, paused=True))
            await asyncio.sleep(0.02)
            await worker.apply_update(WeightUpdate(3))
            episode = await flight
            assert {span.version for node in episode.nodes for span in node.spans} <= {0, 3}
            assert max(span.version for node in episode.nodes for span in node.spans) == 3
            check_recorded(episode, engine)

        self.use(tmp_path, body, engine={"delay_s": 0.01})

    def test_its_episodes_can_be_sent(self, tmp_path: Path) -> None:
        """As JSON to the ledger, and pickled from a worker."""

        async def body(worker: LoopWorker, _: RecordingEngine) -> Episode:
            return await worker.handle(self.request())

        episode = self.use(tmp_path, body)
        assert Episode.from_bytes(episode.to_bytes()) == episode
        assert pickle.loads(pickle.dumps(episode)) == episode  # noqa: S301

    def test_its_config_can_be_sent(self, tmp_path: Path) -> None:
        """It survives pickling and JSON, and a typo is an error at load time."""
        config = self.make_config(tmp_path)
        assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301
        assert config_parser(loops)(config.model_dump(mode="json")) == config
        assert config.problems(tmp_path) == []
        with pytest.raises(ValueError, match="deadlin_s"):
            config_parser(loops)({**config.model_dump(mode="json"), "deadlin_s": 3})


def check_recorded(episode: Episode, engine: RecordingEngine) -> None:
    """Each stream is a path of the episode, token by token, and each sampled token is in one row's mask."""
    paths = [tuple(token for index in path for token in episode.nodes[index].ids) for path in episode.branches()]
    for prompt, sampled in engine.calls:
        whole = (*prompt, *sampled)
        assert any(path[: len(whole)] == whole for path in paths), "a stream is not in the episode"
    assert sum(len(sampled) for _, sampled in engine.calls) == episode.sampled
    assert sum(sum(row.response_mask) for row in episode.rows()) == episode.sampled
