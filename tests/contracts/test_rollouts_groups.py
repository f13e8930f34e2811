"""Contracts L13 and L17: groups that are trained on are whole, and little is produced that cannot be used."""

import asyncio
from collections import Counter
from random import Random

import pytest

from loopwright.core.episode import Episode
from loopwright.core.errors import ScenarioError
from loopwright.ledger.ledger import Ledger
from loopwright.reports.rollout.digest import read_rollouts, rollout_result
from loopwright.rollouts.collect import CollectConfig
from loopwright.rollouts.judgers.base import JudgeFailed
from loopwright.rollouts.loops.worker import RolloutRequest
from loopwright.rollouts.producer import GroupProducer
from loopwright.scenario.load import load
from loopwright.testing import simulate
from loopwright.trainers.grpo import GrpoConfig
from loopwright.trainers.ppo import PpoTrainConfig
from loopwright.trainers.rloo import RlooConfig
from tests.rollouts.harness import World, episode_of, instantly
from tests.survival.campaign import Campaign

SCENARIO = """
name = "short"
[[run]]
name = "r"
agent = { type = "collect", trials = 160, group_size = 4, min_group = 4, batch = 4 }
[run.rollout]
tasks = { type = "jsonl", path = "tasks.jsonl" }
loop = { type = "single_turn" }
judger = { type = "python", function = "flaky:judge", retries = 0, breaker = 0 }
[run.engine]
type = "scripted"
"""


def failing(share: float, seed: int = 7):
    random = Random(seed)

    def verdict(_: Episode) -> float:
        if random.random() < share:
            raise JudgeFailed("the judge is out")
        return random.random()

    return verdict


@pytest.mark.parametrize("budget", [None, 1200])
def test_l13_with_a_judge_that_fails_80_percent_trained_groups_are_whole(tmp_path, budget):
    async def main():
        async with World(tmp_path, instantly, verdict=failing(0.8), budget=budget) as world:
            world.producer = GroupProducer(world.env, world.env.produce, group_size=4, min_group=4)
            step, judged = 0, []
            while step < 25 and (groups := await world.producer.batch(2, step + 1)):
                step += 1
                judged += [group.judged for group in groups]
            counts = world.env.buffer.counts()
            assert set(judged) == {4}
            assert len(judged) == 50 or budget is not None
            # Budget is kept for the groups that were begun: hardly any ends short because it is exhausted.
            assert counts.get("short", 0) + counts.get("failed", 0) <= 0.2 * len(judged), counts

    simulate(main())


def collected(directory, share: float, seed: int = 7, **produce) -> Counter[str]:
    """Groups by status of a run whose first batch could use its whole budget of 160 rollouts."""
    directory.mkdir(exist_ok=True)

    async def main():
        async def roll(request: RolloutRequest) -> Episode:
            await asyncio.sleep(Random(f"{seed}{request.seed}").lognormvariate(0, 0.5))
            return episode_of(request.task, 0)

        async with World(directory, roll, verdict=failing(share, seed), budget=160, **produce) as world:
            world.producer = GroupProducer(world.env, world.env.produce, group_size=4, min_group=4)
            while await world.producer.batch(40, 1):
                world.env.buffer.settle(1)
            assert world.env.book.step <= 160
            return Counter(world.env.buffer.counts())

    return simulate(main())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_l13_budget_is_kept_for_replacements_before_the_first_loss(tmp_path, kind, caplog):
    counts = collected(tmp_path, 0.8, type=kind)
    assert caplog.text.count("the rest of `trials` is too little for a whole group: ") == 1
    assert counts["trained"] >= 5, "of the eight that 160 verdicts of a judge that fails 80 % are enough for"
    assert counts["short"] + counts["failed"] <= 2


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_l13_a_lucky_first_group_does_not_spend_the_budget_for_replacements(tmp_path, share):
    unused = []
    for seed in range(12):  # in some of them, the first group loses no rollout
        counts = collected(tmp_path / str(seed), share, seed)
        unused.append(counts["short"] + counts["failed"])
    assert max(unused) <= 2


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_l13_without_losses_the_whole_budget_is_used(tmp_path, kind):
    assert collected(tmp_path, 0.0, type=kind) == {"trained": 40}


def test_l13_a_group_that_needs_fewer_is_used_with_what_it_has(tmp_path):
    async def main():
        async with World(tmp_path, instantly, verdict=failing(0.8)) as world:
            world.producer = GroupProducer(world.env, world.env.produce, group_size=4, min_group=2)
            sizes = Counter[int]()
            for step in range(10):
                sizes.update(group.judged for group in await world.producer.batch(4, step + 1))
            assert min(sizes) == 2
            assert len(sizes) > 1

    simulate(main())


def test_l13_min_group_is_the_size_where_rollouts_are_compared_and_1_elsewhere():
    assert GrpoConfig(steps=1, group_size=6).min_size == 6
    assert RlooConfig(steps=1).min_size == 8
    assert PpoTrainConfig(steps=1, group_size=4).min_size == CollectConfig(trials=8).min_size == 1
    assert GrpoConfig(steps=1, group_size=6, min_group=3).min_size == 3
    with pytest.raises(ValueError, match=r"`min_group` \(9\) must be at most `group_size` \(8\)"):
        CollectConfig(trials=8, min_group=9)


def test_l13_shortages_are_in_the_terminal_the_report_and_the_ledger(tmp_path):
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"prompt": "{i}", "label": "{i}"}}\n' for i in range(40)))
    # Every second prompt gets at most one verdict, whatever its rollouts say.
    (tmp_path / "flaky.py").write_text(
        "from collections import Counter\ncalls = Counter()\n\ndef judge(label):\n"
        "    calls[label] += 1\n"
        "    if int(label) % 2 and calls[label] > 1:\n        raise ValueError('no verdict')\n    return 1.0\n"
    )
    campaign = Campaign(tmp_path, SCENARIO)
    run = campaign.call("run")
    assert "groups with fewer than 4 judged rollouts (`min_group`) are replaced" in run.err, run.err
    with Ledger.read(campaign.output / "r" / "ledger.db") as ledger:
        statuses = dict(ledger.transaction.rows("SELECT status, count(*) FROM groups GROUP BY 1"))
        unused = "SELECT outcome, count(*) FROM groups JOIN trials USING (grp) WHERE status = 'short' GROUP BY 1"
        outcomes = dict(ledger.transaction.rows(unused))
        event, lines = rollout_result(read_rollouts(ledger))
    assert statuses["short"] == outcomes["filtered"], "the one verdict of each stays on record"
    assert set(outcomes) == {"filtered", "judge_failed"}
    assert event["groups"] == statuses
    shortage = f"{statuses['short']} groups had fewer than 4 judged rollouts: not used."
    assert shortage in lines
    assert shortage in run.out
    assert shortage in (campaign.output / "report.html").read_text()


def test_l13_a_minimum_above_the_size_is_refused(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1"}\n')
    (tmp_path / "flaky.py").write_text("def judge(answer):\n    return 1.0\n")
    (tmp_path / "s.toml").write_text(SCENARIO.replace("min_group = 4", "min_group = 5"))
    with pytest.raises(ScenarioError, match=r"`min_group` \(5\) must be at most `group_size` \(4\)"):
        load(tmp_path / "s.toml")


def learn(directory, *, train_s: float, sigma: float, steps: int = 40, **produce) -> tuple[float, float]:
    """Train for some steps in simulated time: the share of groups that expired, and groups trained per second."""

    async def main():
        async def roll(request: RolloutRequest) -> Episode:
            version = world.worker.version
            await asyncio.sleep(Random(request.seed).lognormvariate(0, sigma))
            return episode_of(request.task, version, world.worker.version)

        world = World(directory, roll, type="async", concurrency=32, **produce)
        async with world:
            loop = asyncio.get_running_loop()
            start_s, trained = loop.time(), 0
            for step in range(1, steps + 1):
                trained += len(await world.producer.batch(8, step))
                await asyncio.sleep(train_s)
                await world.producer.update(step)
                world.env.buffer.settle(step)
            expired = world.env.buffer.counts().get("expired", 0)
            return expired / (trained + expired), trained / (loop.time() - start_s)

    return simulate(main())


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("train_s", [1.0, 10.0])
def test_l17_hardly_any_group_expires_however_slow_the_learner_is(tmp_path, max_staleness, train_s):
    expired, _ = learn(tmp_path, train_s=train_s, sigma=0.1, steps=16, max_staleness=max_staleness)
    assert expired <= 0.05


def test_l17_a_learner_as_slow_as_the_engine_waits_no_longer_for_it(tmp_path):
    expired, rate = learn(tmp_path, train_s=1.13, sigma=0.5, max_staleness=1)
    assert expired <= 0.05
    assert rate >= 0.95 * 3.7, "the rate when surplus was produced, of which a third expired"


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_l17_nothing_is_produced_for_steps_after_the_last(tmp_path, max_staleness):
    async def main():
        async def roll(request: RolloutRequest) -> Episode:
            await asyncio.sleep(Random(request.seed).random())
            return episode_of(request.task, world.worker.version)

        async with World(tmp_path, roll, type="async", over_sample=1.0, max_staleness=max_staleness) as world:
            for step in range(1, 4):
                assert len(await world.producer.batch(4, step, 3)) == 4
                await asyncio.sleep(5)
                await world.producer.update(step)
                world.env.buffer.settle(step)
            assert world.env.buffer.counts() == {"trained": 12}

    simulate(main())


def test_l17_waste_is_shown(tmp_path):
    async def main():
        versions = [0]

        async def roll(request: RolloutRequest) -> Episode:
            return episode_of(request.task, versions[-1])

        async with World(tmp_path, roll, max_staleness=0, group_size=2) as world:
            await world.producer.batch(2, 1)
            world.env.buffer.restore(0)  # the step was never trained
            versions.append(1)
            await world.producer.update(1)
            await world.producer.batch(2, 1)
            _, lines = rollout_result(read_rollouts(world.ledger))
            assert "4 rollouts (50 % of 8) in groups that were not used: 2 expired." in lines

    simulate(main())
