"""The shipped tasks: each one's solution scores 1, its initial state and every trick 0, as real runs judge them."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from loopwright.execution.sandbox import sandbox_of
from loopwright.rollouts.tasks.harbor.check import check_tasks
from loopwright.rollouts.tasks.harbor.source import scan

TASKS = Path(__file__).parents[3] / "examples" / "tasks"


def test_there_are_enough_tasks_of_every_kind():
    tasks = list(scan(TASKS))
    assert [each.problem for each in tasks if each.task is None] == []
    assert len(tasks) >= 20
    by_split = Counter(each.id.partition("/")[0] for each in tasks)
    assert set(by_split) == {"train", "eval"}
    assert min(by_split.values()) >= 5
    for split in by_split:
        graded = {each.task.metadata["difficulty"] for each in tasks if each.id.startswith(split)}
        assert graded == {"easy", "medium", "hard"}
    assert {each.task.metadata["category"] for each in tasks} == {"shell", "python"}


@pytest.mark.parametrize("sandbox", ["none", pytest.param("bwrap", marks=pytest.mark.slow)])
def test_solutions_score_one_and_the_initial_state_and_tricks_score_zero(sandbox):
    async def main():
        return [each async for each in check_tasks(list(scan(TASKS)), sandbox_of(sandbox), jobs=4)]

    checked = asyncio.run(main())
    assert {each.directory.id: each.problems for each in checked if each.problems} == {}
    assert all(each.solved is not None for each in checked)
    assert {each.initial["rewards"]["reward"] for each in checked} == {0.0}
    assert {each.solved["rewards"]["reward"] for each in checked} == {1.0}
    played = Counter(name for each in checked for name, report in each.tricks.items() if "rewards" in report)
    assert played["shadow"] == len(checked)
    assert played["link"] == len(checked) - 1, "all but make-executable, which changes no content"
    assert {*played} == {"link", "alias", "shadow", "forge"}
