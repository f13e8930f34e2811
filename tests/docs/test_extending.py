"""The classes of docs/extending.md work under their names and pass the contract suites that the page names."""

import asyncio
import re
import sys
from contextlib import aclosing
from pathlib import Path
from types import ModuleType

import pytest

from loopwright.agents import agents, rollout_agents
from loopwright.core.trial import rewards
from loopwright.engines.base import Sampling, engines
from loopwright.rollouts.judgers.base import judgers
from loopwright.rollouts.loops.base import loops
from loopwright.rollouts.tasks.sources import task_sources
from loopwright.scenario.load import load
from loopwright.testing import AgentContract, EngineContract, JudgerContract, LoopContract
from loopwright.workloads.base import workloads

TEXT = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
PAGE = sys.modules["docs_extending_page"] = ModuleType("docs_extending_page")
for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
    if "loopwright.testing" not in block and "dispatch(" not in block:
        exec(block, vars(PAGE))


@pytest.fixture
def registered(monkeypatch):
    """The classes are registered as if their package were installed."""
    for registry, name, item in (
        (agents, "near_best", PAGE.NearBest),
        (loops, "ask_twice", PAGE.AskTwice),
        (judgers, "contains", PAGE.Contains),
        (task_sources, "doubling", PAGE.Doubling),
        (engines, "parrot", PAGE.Parrot),
    ):
        monkeypatch.setitem(registry._items, name, item)


@pytest.mark.usefixtures("registered")
def test_a_scenario_can_name_them_all(tmp_path):
    (tmp_path / "study.toml").write_text(
        'name = "study"\n[[run]]\nname = "r"\nagent = { type = "collect", trials = 8 }\n[run.rollout]\n'
        'tasks = { type = "doubling", count = 3 }\nloop = { type = "ask_twice" }\n'
        'judger = { type = "contains", word = "4" }\n[run.engine]\ntype = "parrot"\ntext = "4"\n'
    )
    (run,) = load(tmp_path / "study.toml").scenario.run
    assert [task.label for task in run.rollout.tasks[0].load(tmp_path)] == ["0", "2", "4"]
    assert (run.rollout.loop.question, run.rollout.judger.word, run.engine.text) == ("Are you sure?", "4", "4")


def test_the_engine_gives_its_answer_and_ends_a_stream_when_paused():
    async def main():
        engine = PAGE.Parrot(PAGE.ParrotConfig(text="abc"), Path())
        async with aclosing(engine.generate((1,), Sampling(max_tokens=2), seed="0")) as stream:
            limited = [chunk async for chunk in stream]
        async with aclosing(engine.generate((1,), Sampling(), seed="0")) as stream:
            paused = [await anext(stream)]
            await engine.pause()
            paused += [chunk async for chunk in stream]
        return [chunk.finish for chunk in limited], [chunk.finish for chunk in paused]

    assert asyncio.run(main()) == ([None, "length"], [None, "abort"])


@pytest.mark.usefixtures("registered")
class TestNearBest(AgentContract):
    agent_type = "near_best"

    @pytest.fixture(scope="class")
    @classmethod
    def undisturbed(cls, tmp_path_factory):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(agents._items, "near_best", PAGE.NearBest)
            return cls.campaign(tmp_path_factory.mktemp("undisturbed")).run()


@pytest.mark.usefixtures("registered")
class TestAskTwice(LoopContract):
    replies = ("yes", "no")

    def make_config(self, directory, **settings):
        return PAGE.AskTwiceConfig(**settings)


@pytest.mark.usefixtures("registered")
class TestContains(JudgerContract):
    def make_config(self, directory, behaviour, **settings):
        return PAGE.ContainsConfig(word="4", **settings) if behaviour == "score" else None


@pytest.mark.usefixtures("registered")
class TestParrot(EngineContract):
    def make_engine(self, scenario_dir, *, slow=False):
        return PAGE.Parrot(PAGE.ParrotConfig(text="one, two, three, four", token_s=0.1 if slow else 0.0), scenario_dir)


def test_every_group_of_entry_points_is_named():
    for registry in (agents, rollout_agents, workloads, rewards, loops, judgers, task_sources, engines):
        assert f"`{registry.group}`" in TEXT
