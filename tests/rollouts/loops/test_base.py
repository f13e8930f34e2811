"""Agent loops keep one contract, ours and those of other packages."""

import asyncio
from importlib.metadata import EntryPoint
from typing import Literal

import pytest

from loopwright.core import registry
from loopwright.core.outcome import Outcome
from loopwright.core.registry import Registry, config_parser
from loopwright.core.task import Task
from loopwright.engines.base import Sampling
from loopwright.engines.scripted import ScriptedConfig
from loopwright.rollouts.loops.base import AgentLoop, LoopConfig, SingleTurnConfig, loops
from loopwright.rollouts.loops.tools import ToolLoopConfig
from loopwright.rollouts.loops.worker import LoopWorker, RolloutRequest
from loopwright.testing import LoopContract

TASK = Task("t", ({"role": "user", "content": "Is it?"},), "yes")


class TwiceConfig(LoopConfig):
    type: Literal["twice"] = "twice"


class Twice(AgentLoop):
    Config = TwiceConfig

    async def run(self, task, session):
        first = await session.turn(task.messages)
        await session.turn([*task.messages, first.message, {"role": "user", "content": "Are you sure?"}])
        return session.episode(task)


class Fan(AgentLoop):
    """Parallel sub-agents, and one that summarises."""

    async def run(self, task, session):
        aside = [[*task.messages, {"role": "user", "content": str(n)}] for n in range(3)]
        turns = await asyncio.gather(*(session.turn(messages) for messages in aside))
        await session.turn([*task.messages, *(turn.message for turn in turns)])
        return session.episode(task)


@pytest.fixture(autouse=True)
def _registered():
    for name, loop in {"twice": Twice, "fan": Fan}.items():
        loops.add(name, loop)
    yield
    for name in ("twice", "fan"):
        loops._items.pop(name)


class TestSingleTurn(LoopContract):
    def make_config(self, directory, **settings):
        return SingleTurnConfig(**settings)


class TestTools(LoopContract):
    replies = ('<tool_call>{"name": "double", "arguments": {"x": 2}}</tool_call>', "4", "<tool_call>{")

    def make_config(self, directory, **settings):
        (directory / "contract_tools.py").write_text("def double(x: int) -> int:\n    return 2 * x\n")
        return ToolLoopConfig(tools=("contract_tools:double",), **settings)


class TestTwice(LoopContract):
    def make_config(self, directory, **settings):
        return TwiceConfig(**settings)


class TestFan(LoopContract):
    def make_config(self, directory, **settings):
        return LoopConfig(type="fan", **settings)


def roll(directory, config, **engine):
    async def main():
        worker = LoopWorker.build(config, ScriptedConfig(slip=0.0, **engine), directory)
        try:
            return await worker.handle(RolloutRequest(TASK, "0"))
        finally:
            await worker.close()

    return asyncio.run(main())


def test_a_single_turn_calls_once(tmp_path):
    episode = roll(tmp_path, SingleTurnConfig(), replies=("yes",))
    assert (episode.turns, episode.answer, episode.outcome) == (1, "yes", Outcome.OK)
    assert episode.messages() == [*TASK.messages, {"role": "assistant", "content": "yes"}]


def test_an_unfinished_answer_is_truncated_and_scored(tmp_path):
    episode = roll(tmp_path, SingleTurnConfig(sampling=Sampling(max_tokens=2)), replies=("yes",))
    assert (episode.outcome, episode.fault, episode.answer) == (Outcome.TRUNCATED, "policy", "ye")


def test_a_request_can_override_the_loops_sampling(tmp_path):
    async def main():
        worker = LoopWorker.build(SingleTurnConfig(), ScriptedConfig(replies=("a long answer",), slip=0.5), tmp_path)
        plain = await worker.handle(RolloutRequest(TASK, "0"))
        greedy = await worker.handle(RolloutRequest(TASK, "0", Sampling(temperature=0)))
        await worker.close()
        return plain.answer, greedy.answer

    plain, greedy = asyncio.run(main())
    assert greedy == "a long answer" != plain


def test_memory_is_written_with_its_unit():
    assert config_parser(loops)({"type": "single_turn", "memory": "1GiB"}).memory == 2**30


def test_another_package_adds_a_loop_by_an_entry_point(monkeypatch):
    point = EntryPoint("twice", f"{__name__}:Twice", "loopwright.loops")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == "loopwright.loops" else [])
    installed = Registry("agent loop", "loopwright.loops", AgentLoop)
    assert installed.get("twice") is Twice
    assert config_parser(installed)({"type": "twice", "max_turns": 2}) == TwiceConfig(max_turns=2)


def test_an_unknown_loop_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown agent loop 'singleturn'.*Did you mean 'single_turn'\?"):
        config_parser(loops)({"type": "singleturn"})
