"""`loopwright.Producer`: groups for a trainer of the caller's own."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

import loopwright
from loopwright.ledger.rollouts import rollouts

SCENARIO = {
    "name": "own",
    "run": [
        {
            "name": "own",
            "agent": {"type": "collect", "trials": 48, "group_size": 2, "seed": 1},
            "rollout": {
                "tasks": {"type": "python", "function": "tasks:rows"},
                "loop": {"type": "single_turn"},
                "judger": {"type": "length"},
                "produce": {"type": "async"},
            },
            "engine": {"type": "scripted"},
        }
    ],
}
# Trains two batches, takes a third, and waits to be ended.
TRAINER = """
import asyncio, sys, loopwright
sys.path.insert(0, sys.argv[1])
from scenario import SCENARIO

async def main():
    async with loopwright.Producer(SCENARIO, output=sys.argv[1] + "/out") as producer:
        for version in (1, 2, 3):
            groups = await producer.batch(3)
            if version < 3:
                await producer.publish(None, version)
                producer.trained(groups)
            print(*[group.number for group in groups], flush=True)
        await asyncio.sleep(100)

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def tasks(tmp_path, monkeypatch):
    (tmp_path / "tasks.py").write_text("def rows():\n    return [{'prompt': str(n)} for n in range(6)]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("tasks", None)


def take_all(output, size=3):
    async def main():
        numbers = []
        async with loopwright.Producer(SCENARIO, output=output) as producer:
            while groups := await producer.batch(size):
                producer.trained(groups)
                numbers += [group.number for group in groups]
        return numbers

    return asyncio.run(main())


def test_batches_end_with_the_budget_and_the_output_is_that_of_any_run(tmp_path):
    numbers = take_all(tmp_path / "out")
    assert sorted(numbers) == list(range(1, 25))
    assert take_all(tmp_path / "out") == []
    assert (tmp_path / "out/report.html").exists()
    with loopwright.Ledger.read(tmp_path / "out/own/ledger.db") as ledger:
        assert ledger.state("finished")


def test_an_exception_of_the_trainer_closes_it_and_repeats_what_was_not_trained(tmp_path):
    async def main():
        async with loopwright.Producer(SCENARIO, output=tmp_path / "out") as producer:
            first, second = await producer.batch(3), await producer.batch(3)
            await producer.publish(None, 1)
            with pytest.raises(ValueError, match="oldest first"):
                producer.trained(second)
            producer.trained(first)
            with pytest.raises(ValueError, match="Pass what `batch` returned"):
                producer.trained(first)
            for old in (0, 1):
                with pytest.raises(ValueError, match=f"version {old} is in use; new weights need version 2 or later"):
                    await producer.publish(None, old)
            trained.update(group.number for group in first)
            taken.update(group.number for group in second)
            raise ZeroDivisionError

    trained, taken = set(), set()
    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())
    rest = take_all(tmp_path / "out")
    assert len(rest) == len({*rest})
    assert taken <= {*rest}
    assert not trained & {*rest}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_after_a_signal_nothing_is_trained_twice(tmp_path, number):
    (tmp_path / "scenario.py").write_text(f"SCENARIO = {SCENARIO!r}\n")
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    first, second, third = ({*map(int, process.stdout.readline().split())} for _ in range(3))
    process.send_signal(number)
    process.stdout.close()
    assert process.wait(60) != 0
    rest = take_all(tmp_path / "out")
    assert len(rest) == len({*rest})
    assert third <= {*rest}
    assert not (first | second) & {*rest}


def test_what_was_in_production_continues_with_the_weights_that_are_published_first(tmp_path):
    async def main(*, again):
        settings = {"run.engine.token_s": 0.01}
        async with loopwright.Producer(SCENARIO, output=tmp_path / "out", set=settings) as producer:
            assert producer.version == (5 if again else 0)
            await asyncio.sleep(0.2 * again)  # loads its checkpoint
            await producer.publish(None, 5)
            producer.trained(await producer.batch(3))

    asyncio.run(main(again=False))
    asyncio.run(main(again=True))
    with loopwright.Ledger.read(tmp_path / "out/own/ledger.db") as ledger:
        assert {span.version for each in rollouts(ledger) for node in each.episode.nodes for span in node.spans} == {5}


def test_t06_after_a_crash_before_the_checkpoint_other_weights_get_another_version(tmp_path):
    async def main(*checkpoint):
        settings = {"run.engine.token_s": 0.01}
        async with loopwright.Producer(SCENARIO, output=tmp_path / "out", set=settings) as producer:
            if checkpoint:
                await producer.publish(None, *checkpoint)
            await producer.batch(3)
            published.append(producer.version + 1)
            await producer.publish(None, producer.version + 1)
            await producer.batch(3)
            raise ZeroDivisionError  # before the checkpoint of these weights

    published = []
    for checkpoint in ((), (0,), (1,), (1,)):
        with pytest.raises(ZeroDivisionError):
            asyncio.run(main(*checkpoint))
    assert published == [1, 2, 3, 4]


def test_batches_that_are_requested_at_the_same_time_are_separate(tmp_path):
    async def main():
        async with loopwright.Producer(SCENARIO, output=tmp_path / "out") as producer:
            first, second = await asyncio.gather(producer.batch(2), producer.batch(2))
            producer.trained(first)
            return {group.number for group in first}, {group.number for group in second}

    trained, taken = asyncio.run(main())
    rest = take_all(tmp_path / "out")
    assert taken <= {*rest}
    assert not trained & {*rest}


def test_the_same_object_continues_when_it_is_opened_again(tmp_path):
    async def main():
        producer = loopwright.Producer(SCENARIO, output=tmp_path / "out")
        async with producer:
            taken = {group.number for group in await producer.batch(3)}
        async with producer:
            assert taken & {group.number for group in await producer.batch(24)} == taken

    asyncio.run(main())


def test_it_is_used_inside_a_context(tmp_path):
    producer = loopwright.Producer(SCENARIO, output=tmp_path / "out")
    with pytest.raises(loopwright.LoopwrightError, match="async with"):
        asyncio.run(producer.batch(1))
    with pytest.raises(ValueError, match="at least one group, not 0"):
        asyncio.run(producer.batch(0))
    with pytest.raises(loopwright.ScenarioError, match=r"choose one run .*There are: own"):
        loopwright.Producer(SCENARIO, output=tmp_path / "out", run="other")
