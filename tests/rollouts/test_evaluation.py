"""Evaluations: mean reward and pass@k over tasks, what is said where rollouts were lost, and that they end."""

import asyncio
from itertools import combinations
from statistics import fmean

import pytest

from loopwright.core.episode import Episode
from loopwright.core.outcome import Fault, Outcome
from loopwright.ledger.rollouts import EVALUATED, rollouts
from loopwright.rollouts.evaluation import EvalConfig, summary
from loopwright.rollouts.loops.worker import RolloutRequest
from loopwright.testing import simulate
from tests.rollouts.harness import World, instantly, spoken, tasks


def config(samples: int = 1, **more) -> EvalConfig:
    return EvalConfig(tasks=({"type": "jsonl", "path": "held-out.jsonl"},), samples=samples, **more)


@pytest.mark.parametrize("k", [1, 2, 4, 5])
def test_pass_at_k_is_the_share_of_draws_of_k_that_solve_the_task(k):
    rewards = [1.0, 0.0, 0.5, 1.0, 0.0]
    told = summary([rewards], config(5), seed="s")
    assert told[f"pass@{k}"] == pytest.approx(fmean(max(drawn) >= 1.0 for drawn in combinations(rewards, k)))


def test_solved_is_where_the_scenario_says():
    assert summary([[0.5]], config(solved=0.5), seed="s")["pass@1"] == 1.0
    assert summary([[0.5]], config(), seed="s")["pass@1"] == 0.0


def test_each_task_counts_the_same_however_many_rollouts_it_has_left():
    told = summary([[1.0, 1.0, 1.0], [0.0]], config(3), seed="s")
    assert told["reward"] == 0.5
    assert told["reward_low"] <= 0.5 <= told["reward_high"]
    assert (told["rollouts"], told["faults"]) == (4, 2)
    # The second task has too few to tell how often one of three would do.
    assert told["pass@3"] == 1.0


def test_no_reward_is_no_zero():
    told = summary([[], []], config(2), seed="s")
    assert told == {"tasks": 2, "rollouts": 0, "faults": 4}


def test_there_is_one_before_the_first_step_and_one_after_the_last():
    due = [step for step in range(8) if config(every=3).due(step, 7)]
    assert due == [0, 3, 6, 7]


def losing(lost: int, last: int = 1000):
    """Rollouts of which the first `lost` trials break, at both attempts, and all after the `last`."""

    async def roll(request: RolloutRequest) -> Episode:
        await asyncio.sleep(1.0)
        if not lost < int(request.seed.split(":")[1]) <= last:
            return Episode(request.task).failed(Outcome.LOST, Fault.INFRA, "the engine died")
        return spoken(request.task, 0)

    return roll


def test_a_judger_that_compares_does_not_wait_for_what_stays_lost(tmp_path):
    async def roll(request: RolloutRequest) -> Episode:
        await asyncio.sleep(1.0)
        if int(request.seed.split(":")[1]) > 2:  # all samples of the task but two, however often they are tried
            return Episode(request.task).failed(Outcome.LOST, Fault.INFRA, "the engine died")
        return spoken(request.task, 0)

    async def main():
        async with World(tmp_path, roll, compares=True, held_out={"h": tasks(1, "h")}) as world, asyncio.timeout(100):
            (group,) = world.env.open_evaluation(0, 3)
            await world.env.roll_all([group])
            assert sorted(e.reward.value for e in group.episodes.values()) == [0, 1]
            assert group.trials == 9

    simulate(main())


def test_what_an_evaluation_lost_is_made_again_and_never_trained_on(tmp_path):
    async def main():
        world = World(tmp_path, losing(2), compares=True, held_out={"h": tasks(2, "h")})
        async with world, asyncio.timeout(100):
            groups = world.env.open_evaluation(7, 3)
            await world.env.roll_all(groups)
            assert [len(group.episodes) for group in groups] == [3, 3]
            again = world.env.open_evaluation(7, 3)
            assert [group.number for group in again] == [group.number for group in groups]
            await world.env.roll_all(again)
            seen = list(rollouts(world.ledger))
        assert len(seen) == 8, "nothing is made twice"
        assert {rollout.evaluated for rollout in seen} == {7}
        assert not any(rollout.episode.trainable or rollout.episode.in_baseline for rollout in seen)

    simulate(main())


def test_a_rollout_of_an_evaluation_that_raises_ends_the_others(tmp_path):
    ended = []

    async def roll(request: RolloutRequest) -> Episode:
        if request.task.id == "h/1":
            raise KeyError("a bug")
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(request.task.id)
        return spoken(request.task, 0)

    async def main():
        async with World(tmp_path, roll, held_out={"h": tasks(3, "h")}) as world:
            with pytest.raises(KeyError, match="a bug"):
                await world.env.roll_all(world.env.open_evaluation(0, 1))
            assert sorted(ended) == ["h/0", "h/2"]

    simulate(main())


def test_the_trials_of_an_evaluation_are_found_by_an_index(tmp_path):
    async def main():
        async with World(tmp_path, instantly, held_out={"h": tasks(1, "h")}) as world:
            world.env.open_evaluation(0, 1)
            query = f"EXPLAIN QUERY PLAN SELECT DISTINCT grp FROM trials WHERE {EVALUATED} = ?"
            (plan,) = world.ledger.transaction.rows(query, (0,))
            assert "SEARCH trials USING" in plan[3]
            assert "trials_examined" in plan[3]

    simulate(main())


def test_evaluations_use_up_no_budget_and_are_made_whole_when_there_is_none_left(tmp_path):
    async def main():
        for again in (False, True):
            async with World(tmp_path, losing(1), budget=4, held_out={"h": tasks(2, "h")}) as world:
                groups = world.env.open_evaluation(0, 3)
                await world.env.roll_all(groups)
                assert [len(group.episodes) for group in groups] == [3, 3]
                assert world.env.book.has_budget(4) != again, "also when they were made by an earlier process"
                assert not world.env.book.has_budget(5)
                assert len(await world.producer.batch(1, 1)) == (not again)

    simulate(main())
