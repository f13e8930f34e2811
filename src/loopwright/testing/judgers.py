"""The contract of every judger, as tests.

    class TestMine(JudgerContract):
        def make_config(self, directory: Path, behaviour: Behaviour, **settings: Any) -> JudgerConfig | None:
            return MineConfig(url=SERVERS[behaviour], **settings)

Return None for a behaviour that the judger never shows (counting tokens never fails): its tests are skipped.
"""
# ruff: noqa: S101  These are tests.

import asyncio
import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest

from loopwright.core.episode import ROOT, Episode, Node, Span
from loopwright.core.task import Task
from loopwright.core.trial import Reward
from loopwright.rollouts.judgers.base import FACTS, JudgeFailed, JudgerConfig, Payload, Verdict, parse_judger
from loopwright.rollouts.judgers.guard import GuardedJudger, build_judger
from loopwright.testing.executors import use_and_close

T = TypeVar("T")
Behaviour = Literal["score", "fail", "hang"]
"""`score`: return verdicts. `fail`: always fail. `hang`: never return."""


def episode(answer: str = "4", label: Any = "4", data_source: str = "sums") -> Episode:
    """An episode of one turn: a token for each character of the answer."""
    task = Task("t", ({"role": "user", "content": "2 + 2?"},), label, data_source)
    prompt = Node(0, task.messages[0], (1, 2), (0.0, 0.0))
    count = len(answer)
    spans = (Span(0, count, 0),) if count else ()
    reply = Node(1, {"role": "assistant", "content": answer}, tuple(range(count)), (-0.5,) * count, spans, "stop")
    return Episode(task, (ROOT, prompt, reply))


class JudgerContract(ABC):
    """Subclass it, name the subclass `Test…`, and return a config for each behaviour."""

    @abstractmethod
    def make_config(self, directory: Path, behaviour: Behaviour, **settings: Any) -> JudgerConfig | None:
        """The config of a judger that behaves as `behaviour` says, with these settings."""

    def make_episode(self, answer: str = "4") -> Episode:
        """An episode for it to judge; override it for a judger that needs other facts of an episode."""
        return episode(answer)

    def config(self, directory: Path, behaviour: Behaviour, **settings: Any) -> JudgerConfig:
        """The same, or the test is skipped."""
        config = self.make_config(directory, behaviour, **settings)
        if config is None:
            pytest.skip(f"this judger does not {behaviour}")
        return config

    def use(self, config: JudgerConfig, directory: Path, body: Callable[[GuardedJudger], Awaitable[T]]) -> T:
        """Run `body` with a judger in an event loop, and close it."""
        return use_and_close(lambda: build_judger(config, directory), body)

    def test_a_verdict_is_a_finite_reward_with_named_parts(self, tmp_path: Path) -> None:
        """The result can be trained on, and its parts name their source."""
        config = self.config(tmp_path, "score")
        for verdict in self.use(
            config, tmp_path, lambda judger: verdicts(judger, self.make_episode(), self.make_episode("5"))
        ):
            assert isinstance(verdict, Reward), verdict
            assert math.isfinite(verdict.value)
            assert verdict.parts
            assert all(map(math.isfinite, verdict.parts.values()))

    def test_only_what_it_needs_is_sent(self, tmp_path: Path) -> None:
        """A pickled payload with only the facts in `needs` is enough."""

        async def body(judger: GuardedJudger) -> list[Verdict]:
            assert set(judger.needs) <= set(FACTS)
            sent = [pickle.loads(pickle.dumps(Payload.of(self.make_episode(), judger.needs))) for _ in range(2)]  # noqa: S301
            return await judger.judge_group(sent)

        results = self.use(self.config(tmp_path, "score"), tmp_path, body)
        assert all(isinstance(verdict, Reward) for verdict in results), results

    def test_the_weight_is_a_factor(self, tmp_path: Path) -> None:
        """Twice the weight is twice the reward."""
        once, twice = (
            self.use(
                self.config(tmp_path, "score", weight=weight),
                tmp_path,
                lambda j: verdicts(j, self.make_episode(), self.make_episode("5")),
            )
            for weight in (1.0, 2.0)
        )
        assert [2.0 * v.value for v in once if isinstance(v, Reward)] == [
            v.value for v in twice if isinstance(v, Reward)
        ]

    def test_an_empty_episode_gives_a_verdict_or_none(self, tmp_path: Path) -> None:
        """An empty answer breaks nothing."""
        empty = Episode(Task("t", ({"role": "user", "content": "2 + 2?"},), "4", "sums"))
        config = self.config(tmp_path, "score", retries=0)
        results = self.use(config, tmp_path, lambda judger: verdicts(judger, empty, empty))
        assert all(isinstance(verdict, Reward | JudgeFailed) for verdict in results)

    def test_many_at_a_time(self, tmp_path: Path) -> None:
        """Each gets its own verdict."""
        many = [self.make_episode("4" if index % 2 else "5") for index in range(12)]

        async def body(judger: GuardedJudger) -> tuple[list[Verdict], list[Verdict]]:
            return await verdicts(judger, *many), await verdicts(judger, *many[:2])

        together, two = self.use(self.config(tmp_path, "score", concurrency=3), tmp_path, body)
        assert len(together) == len(many)
        assert len(two) == 2
        values = [verdict.value for verdict in together if isinstance(verdict, Reward)]
        assert values == values[:2] * 6

    def test_a_failure_gives_no_reward(self, tmp_path: Path) -> None:
        """It is never zero, and it names the judger."""
        config = self.config(tmp_path, "fail", retries=1, pause_s=0.0)
        for verdict in self.use(
            config, tmp_path, lambda judger: verdicts(judger, self.make_episode(), self.make_episode())
        ):
            assert isinstance(verdict, JudgeFailed)
            assert str(verdict)

    def test_hanging_is_a_failure_and_blocks_nothing(self, tmp_path: Path) -> None:
        """The event loop keeps running, and the verdict fails at the timeout."""

        async def body(judger: GuardedJudger) -> tuple[list[Verdict], int]:
            flight = asyncio.ensure_future(verdicts(judger, self.make_episode(), self.make_episode()))
            turns = 0
            while not flight.done():
                await asyncio.sleep(0.001)
                turns += 1
            return await flight, turns

        config = self.config(tmp_path, "hang", retries=0, timeout_s=0.3)
        results, turns = self.use(config, tmp_path, body)
        assert all(isinstance(verdict, JudgeFailed) for verdict in results)
        assert turns > 10

    def test_cancelling_is_not_a_failure(self, tmp_path: Path) -> None:
        """The caller gets a CancelledError, and the judger can be closed at once."""

        async def body(judger: GuardedJudger) -> None:
            flight = asyncio.ensure_future(verdicts(judger, self.make_episode(), self.make_episode()))
            await asyncio.sleep(0.05)
            flight.cancel()
            with pytest.raises(asyncio.CancelledError):
                await flight

        self.use(self.config(tmp_path, "hang"), tmp_path, body)

    def test_closing_twice_is_fine(self, tmp_path: Path) -> None:
        """With or without a verdict before."""

        async def body(judger: GuardedJudger) -> None:
            await judger.close()

        self.use(self.config(tmp_path, "score"), tmp_path, body)

    def test_its_config_can_be_sent(self, tmp_path: Path) -> None:
        """It survives pickling and JSON, by which it reaches workers and records."""
        config = self.config(tmp_path, "score")
        assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301
        assert parse_judger(config.model_dump(mode="json")) == config

    def test_a_typo_is_an_error_at_load_time(self, tmp_path: Path) -> None:
        """An unknown key is an error; a good config has no problems."""
        config = self.config(tmp_path, "score")
        assert config.problems(tmp_path) == []
        with pytest.raises(ValueError, match="tymeout_s"):
            parse_judger({**config.model_dump(mode="json"), "tymeout_s": 3})


async def verdicts(judger: GuardedJudger, *episodes: Episode) -> list[Verdict]:
    """The verdicts on these episodes, as one group."""
    return await judger.judge_group([Payload.of(episode, judger.needs) for episode in episodes])
