"""What every judger promises, as tests.

    class TestMine(JudgerContract):
        def make_config(self, home: Path, story: Story, **settings: Any) -> JudgerConfig | None:
            return MineConfig(url=SERVERS[story], **settings)

A story that a judger cannot tell (a count of tokens neither fails nor hangs) is None, and its tests are skipped.
"""
# ruff: noqa: S101  These are tests, wherever they stand.

import asyncio
import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest

from loopwright.core.episode import ROOT, Episode, Node, Span
from loopwright.core.reward import Reward
from loopwright.core.task import Task
from loopwright.rollouts.judgers.base import FACTS, JudgeFailed, JudgerConfig, Payload, Verdict, parse_judger
from loopwright.rollouts.judgers.guard import GuardedJudger, build_judger

T = TypeVar("T")
Story = Literal["score", "fail", "hang"]
"""`score`: give verdicts. `fail`: give none, ever. `hang`: never come back with one."""
_DEADLINE_S = 60.0


def episode(answer: str = "4", label: Any = "4", data_source: str = "sums") -> Episode:
    """An episode of one turn: a token for each character of the answer."""
    task = Task("t", ({"role": "user", "content": "2 + 2?"},), label, data_source)
    given = Node(0, task.messages[0], (1, 2), (0.0, 0.0))
    count = len(answer)
    spans = (Span(0, count, 0),) if count else ()
    said = Node(1, {"role": "assistant", "content": answer}, tuple(range(count)), (-0.5,) * count, spans, "stop")
    return Episode(task, (ROOT, given, said))


class JudgerContract(ABC):
    """Subclass it, name the subclass `Test…`, and give it a config for each story."""

    @abstractmethod
    def make_config(self, home: Path, story: Story, **settings: Any) -> JudgerConfig | None:
        """The config of a judger that does what `story` says, with these settings."""

    def make_episode(self, answer: str = "4") -> Episode:
        """An episode for it to judge; override it for a judger that goes by what a loop brings home."""
        return episode(answer)

    def config(self, home: Path, story: Story, **settings: Any) -> JudgerConfig:
        """The same, or the test is skipped."""
        config = self.make_config(home, story, **settings)
        if config is None:
            pytest.skip(f"this judger does not {story}")
        return config

    def use(self, config: JudgerConfig, home: Path, story: Callable[[GuardedJudger], Awaitable[T]]) -> T:
        """Run `story` with a judger in an event loop, and close it."""

        async def main() -> T:
            judger = build_judger(config, home)
            try:
                return await asyncio.wait_for(story(judger), _DEADLINE_S)
            finally:
                await judger.close()

        return asyncio.run(main())

    def test_a_verdict_is_a_finite_reward_with_named_parts(self, tmp_path: Path) -> None:
        """Whatever it returned is a number that can be trained on, and says where it came from."""
        config = self.config(tmp_path, "score")
        for verdict in self.use(
            config, tmp_path, lambda judger: verdicts(judger, self.make_episode(), self.make_episode("5"))
        ):
            assert isinstance(verdict, Reward), verdict
            assert math.isfinite(verdict.value)
            assert verdict.parts
            assert all(map(math.isfinite, verdict.parts.values()))

    def test_only_what_it_needs_is_sent(self, tmp_path: Path) -> None:
        """A payload that went through another process, with nothing but its needs, is enough."""

        async def story(judger: GuardedJudger) -> list[Verdict]:
            assert set(judger.needs) <= set(FACTS)
            sent = [pickle.loads(pickle.dumps(Payload.of(self.make_episode(), judger.needs))) for _ in range(2)]  # noqa: S301
            return await judger.judge_group(sent)

        found = self.use(self.config(tmp_path, "score"), tmp_path, story)
        assert all(isinstance(verdict, Reward) for verdict in found), found

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
        """A policy that said nothing breaks nothing."""
        empty = Episode(Task("t", ({"role": "user", "content": "2 + 2?"},), "4", "sums"))
        config = self.config(tmp_path, "score", retries=0)
        found = self.use(config, tmp_path, lambda judger: verdicts(judger, empty, empty))
        assert all(isinstance(verdict, Reward | JudgeFailed) for verdict in found)

    def test_many_at_a_time(self, tmp_path: Path) -> None:
        """Each gets its own verdict."""
        many = [self.make_episode("4" if index % 2 else "5") for index in range(12)]

        async def story(judger: GuardedJudger) -> tuple[list[Verdict], list[Verdict]]:
            return await verdicts(judger, *many), await verdicts(judger, *many[:2])

        together, two = self.use(self.config(tmp_path, "score", concurrency=3), tmp_path, story)
        assert len(together) == len(many)
        assert len(two) == 2
        values = [verdict.value for verdict in together if isinstance(verdict, Reward)]
        assert values == values[:2] * 6

    def test_a_failure_is_no_reward(self, tmp_path: Path) -> None:
        """It is never a zero, and it says which judger it was."""
        config = self.config(tmp_path, "fail", retries=1, pause_s=0.0)
        for verdict in self.use(
            config, tmp_path, lambda judger: verdicts(judger, self.make_episode(), self.make_episode())
        ):
            assert isinstance(verdict, JudgeFailed)
            assert str(verdict)

    def test_hanging_is_a_failure_and_holds_up_nothing(self, tmp_path: Path) -> None:
        """The event loop goes on meanwhile, and the verdict fails at the timeout."""

        async def story(judger: GuardedJudger) -> tuple[list[Verdict], int]:
            flight = asyncio.ensure_future(verdicts(judger, self.make_episode(), self.make_episode()))
            turns = 0
            while not flight.done():
                await asyncio.sleep(0.001)
                turns += 1
            return await flight, turns

        config = self.config(tmp_path, "hang", retries=0, timeout_s=0.3)
        found, turns = self.use(config, tmp_path, story)
        assert all(isinstance(verdict, JudgeFailed) for verdict in found)
        assert turns > 10

    def test_cancelling_is_not_a_failure(self, tmp_path: Path) -> None:
        """Whoever cancels gets a cancellation, and the judger can be closed at once."""

        async def story(judger: GuardedJudger) -> None:
            flight = asyncio.ensure_future(verdicts(judger, self.make_episode(), self.make_episode()))
            await asyncio.sleep(0.05)
            flight.cancel()
            with pytest.raises(asyncio.CancelledError):
                await flight

        self.use(self.config(tmp_path, "hang"), tmp_path, story)

    def test_closing_twice_is_fine(self, tmp_path: Path) -> None:
        """With or without a verdict before."""

        async def story(judger: GuardedJudger) -> None:
            await judger.close()

        self.use(self.config(tmp_path, "score"), tmp_path, story)

    def test_its_config_travels(self, tmp_path: Path) -> None:
        """It survives pickling and JSON, by which it reaches workers and records."""
        config = self.config(tmp_path, "score")
        assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301
        assert parse_judger(config.model_dump(mode="json")) == config

    def test_a_typo_is_found_before_anything_starts(self, tmp_path: Path) -> None:
        """An unknown key is an error; a good config has no problems."""
        config = self.config(tmp_path, "score")
        assert config.problems(tmp_path) == []
        with pytest.raises(ValueError, match="tymeout_s"):
            parse_judger({**config.model_dump(mode="json"), "tymeout_s": 3})


async def verdicts(judger: GuardedJudger, *episodes: Episode) -> list[Verdict]:
    """The verdicts on these episodes, as one group."""
    return await judger.judge_group([Payload.of(episode, judger.needs) for episode in episodes])
