"""What docs/extending.md shows can be copied: its classes load under their names, and pass the suites that it names."""

import asyncio
import re
import sys
from contextlib import aclosing
from pathlib import Path
from types import ModuleType

import pytest

from loopwright.engines.base import Sampling, engines
from loopwright.rollouts.judgers.base import judgers
from loopwright.rollouts.loops.base import loops
from loopwright.rollouts.tasks.sources import task_sources
from loopwright.scenario.load import load
from loopwright.testing import JudgerContract, LoopContract

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
SHOWN = sys.modules["shown_in_extending"] = ModuleType("shown_in_extending")
for block in re.findall(r"```python\n(.*?)```", PAGE.partition("## What rollouts are made of")[2], re.DOTALL):
    if "class Test" not in block and "Observer" not in block and "dispatch(" not in block:
        exec(block, vars(SHOWN))


@pytest.fixture
def joined(monkeypatch):
    """The registries as if the package were installed."""
    for registry, name, item in (
        (loops, "ask_twice", SHOWN.AskTwice),
        (judgers, "contains", SHOWN.Contains),
        (task_sources, "doubling", SHOWN.Doubling),
        (engines, "parrot", SHOWN.Parrot),
    ):
        monkeypatch.setitem(registry._items, name, item)


@pytest.mark.usefixtures("joined")
def test_a_scenario_can_name_them_all(tmp_path):
    (tmp_path / "study.toml").write_text(
        'name = "study"\n[[run]]\nname = "r"\nagent = { type = "collect", trials = 8 }\n[run.rollout]\n'
        'tasks = { type = "doubling", count = 3 }\nloop = { type = "ask_twice" }\n'
        'judger = { type = "contains", word = "4" }\n[run.engine]\ntype = "parrot"\ntext = "4"\n'
    )
    (run,) = load(tmp_path / "study.toml").scenario.run
    assert [task.label for task in run.rollout.tasks[0].load(tmp_path)] == ["0", "2", "4"]
    assert (run.rollout.loop.question, run.rollout.judger.word, run.engine.text) == ("Are you sure?", "4", "4")


def test_the_engine_says_its_piece_and_heeds_a_pause():
    async def main():
        engine = SHOWN.Parrot(SHOWN.ParrotConfig(text="abc"), Path())
        async with aclosing(engine.generate((1,), Sampling(max_tokens=2), seed="0")) as stream:
            short = [chunk async for chunk in stream]
        async with aclosing(engine.generate((1,), Sampling(), seed="0")) as stream:
            cut = [await anext(stream)]
            await engine.pause()
            cut += [chunk async for chunk in stream]
        return [chunk.finish for chunk in short], [chunk.finish for chunk in cut]

    assert asyncio.run(main()) == ([None, "length"], [None, "abort"])


@pytest.mark.usefixtures("joined")
class TestAskTwice(LoopContract):
    replies = ("yes", "no")

    def make_config(self, home, **settings):
        return SHOWN.AskTwiceConfig(**settings)


@pytest.mark.usefixtures("joined")
class TestContains(JudgerContract):
    def make_config(self, home, story, **settings):
        return SHOWN.ContainsConfig(word="4", **settings) if story == "score" else None


def test_every_group_of_entry_points_is_named():
    for registry in (loops, judgers, task_sources, engines):
        assert f'[project.entry-points."{registry.group}"]' in PAGE
