"""Production: batches, refills, staleness, pauses; in simulated time, over a real ledger."""

import asyncio
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from loopwright.core.episode import Episode
from loopwright.core.outcome import Fault, Outcome
from loopwright.ledger.rollouts import rollouts
from loopwright.rollouts.judgers.base import JudgeFailed
from loopwright.rollouts.loops.worker import RolloutRequest
from loopwright.rollouts.producer import ProductionFailed
from loopwright.testing import simulate
from tests.rollouts.harness import World, episode_of, instantly, tasks


def lasting(seconds: float | dict[str, float]):
    async def roll(request: RolloutRequest) -> Episode:
        await asyncio.sleep(seconds if isinstance(seconds, float) else seconds.get(request.task.id, 1.0))
        return episode_of(request.task, 0)

    return roll


def test_synchronous_production_makes_a_batch_on_request(tmp_path):
    async def main():
        async with World(tmp_path, instantly) as world:
            groups = await world.producer.batch(3, 1)
            assert [len(group.episodes) for group in groups] == [4, 4, 4]
            assert world.producer.in_flight == 0
            assert world.env.book.step == 12

    simulate(main())


def test_asynchronous_production_returns_finished_groups_first_and_keeps_the_rest(tmp_path):
    slow = {f"t/{i}": 100.0 for i in range(0, 1000, 5)}

    async def main():
        async with World(tmp_path, lasting(slow), type="async", over_sample=1.0) as world:
            loop = asyncio.get_running_loop()
            first = await world.producer.batch(4, 1)
            assert loop.time() < 100
            task_ids = [group.prompt.task.id for group in first]
            while loop.time() < 100:
                task_ids += [group.prompt.task.id for group in await world.producer.batch(4, 2)]
            task_ids += [group.prompt.task.id for group in await world.producer.batch(4, 3)]
            assert any(name in slow for name in task_ids), "long groups come later"
            assert len(task_ids) == len(set(task_ids))

    simulate(main())


def test_l07_only_a_lost_sample_is_repeated(tmp_path):
    calls = Counter[str]()

    async def roll(request: RolloutRequest) -> Episode:
        calls[request.task.id] += 1
        if calls[request.task.id] in (1, 2):  # the first sample and its second attempt
            return Episode(request.task).failed(Outcome.LOST, Fault.INFRA, "the engine died")
        return episode_of(request.task, 0)

    async def main():
        async with World(tmp_path, roll, group_size=8, concurrency=1) as world:
            (group,) = await world.producer.batch(1, 1)
            assert len(group.episodes) == 8
            assert group.trials == 9
            rows = list(world.ledger.trials())
            assert Counter(str(t.outcome) for t in rows) == {"ok": 8, "lost": 1}
            lost_trial = next(t for t in rows if t.outcome is Outcome.LOST)
            assert lost_trial.reward is None
            assert lost_trial.fault is Fault.INFRA

    simulate(main())


def test_l07_one_prompt_that_always_fails_does_not_end_the_batch(tmp_path):
    async def roll(request: RolloutRequest) -> Episode:
        if request.task.id == "t/0":
            return Episode(request.task).failed(Outcome.CRASHED, Fault.WORKLOAD, "ValueError: no")
        return episode_of(request.task, 0)

    async def main():
        async with World(tmp_path, roll, sources={"t": tasks(3)}) as world:
            groups = await world.producer.batch(3, 1)
            assert len(groups) == 3
            assert "t/0" not in {group.prompt.task.id for group in groups}
            assert world.env.buffer.counts()["failed"] == 1

    simulate(main())


def test_l05_a_judge_that_always_fails_gives_no_reward_and_never_zero(tmp_path):
    def verdict(_: Episode) -> float:
        raise JudgeFailed("the judge is out")

    async def main():
        async with World(tmp_path, instantly, verdict=verdict, budget=40) as world:
            assert await world.producer.batch(2, 1) == []
            rows = list(world.ledger.trials())
            assert {str(t.outcome) for t in rows} == {"judge_failed"}
            assert {t.fault for t in rows} == {Fault.JUDGE}
            assert {t.reward for t in rows} == {None}
            assert len(rows) <= 40

    simulate(main())


def test_l07_if_every_group_fails_production_ends_with_the_reason(tmp_path):
    async def roll(request: RolloutRequest) -> Episode:
        await asyncio.sleep(0.1)
        return Episode(request.task).failed(Outcome.CRASHED, Fault.WORKLOAD, "ValueError: no")

    async def main():
        async with World(tmp_path, roll) as world, asyncio.timeout(10_000):
            with pytest.raises(ProductionFailed, match=r"20 groups in a row .* 20 failed .*: ValueError: no"):
                await world.producer.batch(2, 1)
            assert world.env.buffer.counts()["failed"] == 20

    simulate(main())


def test_failures_caused_by_the_policy_are_scored_and_count(tmp_path):
    async def roll(request: RolloutRequest) -> Episode:
        return episode_of(request.task, 0, outcome=Outcome.TRUNCATED)

    async def main():
        async with World(tmp_path, roll, verdict=lambda _: 0.0) as world:
            (group,) = await world.producer.batch(1, 1)
            assert group.trials == 4, "nothing was repeated"
            assert all(e.trainable and e.in_baseline and e.reward.value == 0.0 for e in group.episodes.values())
            assert {t.reward.value for t in world.ledger.trials()} == {0.0}

    simulate(main())


def test_groups_without_contrast_are_filtered_and_recorded(tmp_path):
    async def roll(request: RolloutRequest) -> Episode:
        return episode_of(request.task, 0, text=request.seed)

    async def main():
        async with World(
            tmp_path,
            roll,
            verdict=lambda e: float(len(e.answer) % 2) if int(e.task.label) % 2 else 0.5,
            filter="equal_rewards",
            group_size=20,
        ) as world:
            groups = await world.producer.batch(2, 1)
            assert all(int(group.prompt.task.label) % 2 for group in groups)
            filtered = [t for t in world.ledger.trials() if t.outcome is Outcome.FILTERED]
            assert filtered
            assert all(t.reward is not None for t in filtered), "filtered, with its reward recorded"

    simulate(main())


def test_if_nearly_all_groups_are_filtered_a_batch_has_the_rest(tmp_path, caplog):
    """In order, the first two prompts are useful, the third fails, and no other has a contrast."""
    came: dict[str, int] = {}

    async def roll(request: RolloutRequest) -> Episode:
        came.setdefault(request.task.id, len(came))
        await asyncio.sleep(0.1)
        return episode_of(request.task, 0, text=request.seed)

    def verdict(episode: Episode) -> float:
        if came[episode.task.id] == 2:
            raise JudgeFailed("no verdict on this one")
        return float(episode.answer.split(":")[1]) if came[episode.task.id] < 2 else 0.5

    async def main():
        async with World(tmp_path, roll, verdict=verdict, filter="equal_rewards") as world, asyncio.timeout(1000):
            groups = await world.producer.batch(3, 1)
            assert [came[group.prompt.task.id] for group in groups] == [0, 1]
            discarded = world.producer.discarded
            assert discarded.groups == {"filtered": 29, "failed": 1}
            assert discarded.trials == 29 * 4 + 12, "all samples of a failing group are attempted three times"
            assert discarded.rewards == [0.5] * 29 * 4
            assert "2 groups instead of 3" in caplog.text
            assert "1 failed (the last: no verdict on this one) and 29 had equal rewards" in caplog.text
            with pytest.raises(ProductionFailed, match="10 had equal rewards"):
                await world.producer.batch(1, 2)

    simulate(main())


@pytest.mark.parametrize("staleness", ["group", "token"])
def test_l08_a_group_that_never_called_the_policy_has_its_current_version(tmp_path, staleness):
    async def roll(request: RolloutRequest) -> Episode:
        await asyncio.sleep(0.1)
        return episode_of(request.task)

    async def main():
        async with World(tmp_path, roll, max_staleness=1, staleness=staleness) as world, asyncio.timeout(60):
            await world.producer.update(5)
            (group,) = await world.producer.batch(1, 6)
            assert not any(episode.trainable for episode in group.episodes.values())
            assert world.env.buffer.counts() == {"taken": 1}

    simulate(main())


def test_l08_stale_groups_expire_and_their_prompts_are_repeated(tmp_path):
    world: World

    async def roll(request: RolloutRequest) -> Episode:
        version = world.worker.version
        await asyncio.sleep(1.0)
        return episode_of(request.task, version)

    async def main():
        nonlocal world
        world = World(tmp_path, roll, type="async", over_sample=1.0, max_staleness=1)
        async with world:
            first = await world.producer.batch(2, 1)
            await asyncio.sleep(10)  # groups of version 0, made ahead, are ready now
            for version in (1, 2):
                await world.producer.update(version)
            later = await world.producer.batch(4, 2)
            assert all(group.version() >= 1 for group in later)
            expired = [t.action["task"] for t in world.ledger.trials() if t.outcome is Outcome.EXPIRED]
            assert world.env.buffer.counts()["expired"] == len(expired) / 4 > 0
            again = {t.action["task"] for t in world.ledger.trials() if t.outcome is not Outcome.EXPIRED}
            assert set(expired) <= again, "no prompt is lost"
            assert not set(expired) & {group.prompt.task.id for group in first}

    simulate(main())


def test_l08_invalid_episodes_expire_with_their_group_and_are_not_trained_on(tmp_path):
    policy = [0]

    async def roll(request: RolloutRequest) -> Episode:
        broken = request.seed.endswith(":1:0")
        episode = episode_of(request.task, policy[-1], outcome=Outcome.INVALID if broken else Outcome.OK)
        return replace(episode, fault=Fault.POLICY) if broken else episode

    async def main():
        async with World(tmp_path, roll, max_staleness=0, group_size=2) as world:
            await world.producer.batch(1, 1)
            world.env.buffer.restore(0)  # the step was never trained
            policy.append(1)
            await world.producer.update(1)
            await world.producer.batch(1, 1)
            first, second = rollouts(world.ledger, [1, 2])
        assert [each.episode.outcome for each in (first, second)] == [Outcome.EXPIRED] * 2
        assert not first.episode.trainable
        assert not second.episode.trainable
        assert first.episode.reward is not None

    simulate(main())


def test_l08_staleness_by_token_keeps_a_group_with_some_fresh_tokens(tmp_path):
    async def roll(request: RolloutRequest) -> Episode:
        return episode_of(request.task, 0, 0, 3)

    async def main():
        async with World(tmp_path, roll, staleness="token", max_staleness=1) as world:
            await world.producer.update(3)
            (group,) = await world.producer.batch(1, 1)
            assert group.version() == 0
            rows = [row for e in group.episodes.values() for row in e.rows()]
            assert all(row.versions == (0, 0, 3) for row in rows)

    simulate(main())


def test_l08_pause_leaves_nothing_pending_and_records_cancelled_rollouts(tmp_path):
    async def main():
        durations = {f"t/{i}": 1000.0 for i in range(0, 1000, 2)}
        async with World(tmp_path, lasting(durations), type="async", over_sample=1.0) as world:
            loop = asyncio.get_running_loop()
            waiting = asyncio.ensure_future(world.producer.batch(4, 1))
            await asyncio.sleep(0.5)
            start = loop.time()
            cancelled = await world.producer.pause(5)
            assert loop.time() - start <= 6
            assert world.producer.in_flight == world.env.loop.in_flight == 0
            aborted = [t for t in world.ledger.trials() if t.outcome is Outcome.ABORTED]
            assert len(aborted) == cancelled > 0
            unfinished = [t.number for t in world.ledger.unfinished()]
            world.producer.resume()
            groups = await waiting
            assert len(groups) == 4
            world.ledger.flush()
            assert not set(unfinished) & {
                t.number for t in world.ledger.unfinished() if t.group in {g.number for g in groups}
            }

    simulate(main())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_l09_sources_share_each_batch_by_weight(tmp_path, kind):
    async def main():
        sources = {"a": tasks(50, "a"), "b": tasks(7, "b")}
        async with World(tmp_path, instantly, sources=sources, weights={"a": 3.0, "b": 1.0}, type=kind) as world:
            counts = Counter[str]()
            for step in range(1, 11):
                for group in await world.producer.batch(8, step):
                    counts[group.prompt.source] += 1
            assert counts["a"] in range(58, 63)
            assert counts.total() == 80

    simulate(main())


def test_l09_a_crash_at_any_moment_loses_no_prompt_and_trains_none_twice(tmp_path):
    """The process dies repeatedly at any moment; only the ledger remains."""
    random = Random(1)

    async def roll(request: RolloutRequest) -> Episode:
        await asyncio.sleep(random.lognormvariate(0, 1))
        if random.random() < 0.05:
            return Episode(request.task).failed(Outcome.LOST, Fault.INFRA, "gone")
        return episode_of(request.task, 0)

    trained: list[int] = []
    checkpoint = 0

    async def life(directory: Path, seconds: float, grave: Path) -> bool:
        """Work until the end, or until the process dies, after which only the ledger on disk remains."""
        nonlocal checkpoint
        async with World(directory, roll, type="async", over_sample=0.5, budget=480) as world:
            world.producer.restore(checkpoint)
            dies = asyncio.get_running_loop().time() + seconds
            try:
                async with asyncio.timeout_at(dies):
                    while groups := await world.producer.batch(5, checkpoint + 1):
                        await asyncio.sleep(0.3)  # the step itself; after a crash here its groups return
                        trained.extend(group.number for group in groups)
                        checkpoint += 1
                        world.env.buffer.settle(checkpoint)
                    return True
            except TimeoutError:
                grave.mkdir()
                for name in ("ledger.head", "ledger.db", "ledger.db-wal"):  # the head never ahead of the events
                    shutil.copy(directory / name, grave)
                return False

    lives = 1
    (tmp_path / "1").mkdir()
    while not simulate(life(tmp_path / str(lives), random.uniform(0.5, 6.0), tmp_path / str(lives + 1))):
        lives += 1
    assert lives > 5
    assert len(trained) == len(set(trained))
    world = World(tmp_path / str(lives), roll)
    rows = list(world.ledger.trials())
    assert [t.number for t in rows] == list(range(1, len(rows) + 1))
    counts = world.env.buffer.counts()
    assert counts.get("open", 0) == counts.get("ready", 0) == counts.get("taken", 0) == 0
    assert counts["trained"] == len(trained)
    draw_count = world.env.buffer.draws()["t"]
    assert draw_count == counts["trained"] + counts.get("failed", 0), "every drawn prompt is accounted for"
    world.ledger.close()


def test_with_five_percent_faults_few_samples_are_repeated(tmp_path):
    random = Random(7)
    rolled = 0

    async def roll(request: RolloutRequest) -> Episode:
        nonlocal rolled
        rolled += 1
        if random.random() < 0.05:
            return Episode(request.task).failed(Outcome.LOST, Fault.INFRA, "gone")
        return episode_of(request.task, 0)

    async def main():
        async with World(tmp_path, roll, group_size=8) as world:
            groups = await world.producer.batch(250, 1)
            assert sum(len(group.episodes) for group in groups) == 2000
            assert rolled <= 1.08 * 2000

    simulate(main())


def test_a_group_judger_gets_the_whole_group_including_replacements(tmp_path):
    calls = Counter[str]()

    async def roll(request: RolloutRequest) -> Episode:
        calls[request.task.id] += 1
        if calls[request.task.id] <= 2:
            return Episode(request.task).failed(Outcome.LOST, Fault.INFRA, "gone")
        await asyncio.sleep(calls.total())
        return episode_of(request.task, 0)

    async def main():
        async with World(tmp_path, roll, compares=True, concurrency=2, group_size=5) as world:
            (group,) = await world.producer.batch(1, 1)
            assert sorted(e.reward.value for e in group.episodes.values()) == [0, 1, 2, 3, 4]
            assert len(world.judge.judged) == 5

    simulate(main())


def test_a_group_judger_judges_an_incomplete_group_when_the_budget_is_spent(tmp_path):
    calls = Counter[str]()

    async def roll(request: RolloutRequest) -> Episode:
        calls[request.task.id] += 1
        if calls[request.task.id] <= 2:
            return Episode(request.task).failed(Outcome.LOST, Fault.INFRA, "gone")
        return episode_of(request.task, 0)

    async def main():
        async with World(tmp_path, roll, compares=True, concurrency=1, group_size=5, budget=5) as world:
            (group,) = await world.producer.batch(1, 1)
            assert len(group.episodes) == 4

    simulate(main())


def test_a_bug_is_raised_to_the_caller_that_waits_for_a_batch(tmp_path):
    async def roll(request: RolloutRequest) -> Episode:
        raise KeyError("a bug")

    async def main():
        async with World(tmp_path, roll) as world:
            with pytest.raises(KeyError, match="a bug"):
                await world.producer.batch(1, 1)

    simulate(main())


def test_an_episode_that_cannot_be_stored_loses_only_its_own_sample(tmp_path):
    async def roll(request: RolloutRequest) -> Episode:
        episode = episode_of(request.task, 0)
        odd = {"handle": object()}
        return replace(episode, evidence=odd) if request.seed.split(":")[1] == "1" else episode

    async def main():
        async with World(tmp_path, roll) as world:
            (group,) = await world.producer.batch(1, 1)
            (rollout,) = rollouts(world.ledger, [1])
        assert sorted(group.episodes) == [2, 3, 4, 5]
        assert (rollout.episode.outcome, rollout.episode.fault) == (Outcome.CRASHED, Fault.WORKLOAD)
        assert "cannot be serialized" in rollout.episode.reason
        assert rollout.episode.reward is None

    simulate(main())
