"""Evaluations: mean reward and pass@k over tasks, lost rollouts, and termination."""

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
from tests.rollouts.harness import World, episode_of, instantly, tasks


def config(samples: int = 1, **more) -> EvalConfig:
    return EvalConfig(tasks=({"type": "jsonl", "path": "held-out.jsonl"},), samples=samples, **more)


@pytest.mark.parametrize("k", [1, 2, 4, 5])
def test_pass_at_k_is_the_share_of_draws_of_k_that_solve_the_task(k):
    rewards = [1.0, 0.0, 0.5, 1.0, 0.0]
    numbers = summary([rewards], config(5), seed="s")
    assert numbers[f"pass@{k}"] == pytest.approx(fmean(max(draw) >= 1.0 for draw in combinations(rewards, k)))


def test_the_scenario_sets_the_solved_threshold():
    assert summary([[0.5]], config(solved=0.5), seed="s")["pass@1"] == 1.0
    assert summary([[0.5]], config(), seed="s")["pass@1"] == 0.0


def test_each_task_counts_equally_however_many_rollouts_remain():
    numbers = summary([[1.0, 1.0, 1.0], [0.0]], config(3), seed="s")
    assert numbers["reward"] == 0.5
    assert numbers["reward_low"] <= 0.5 <= numbers["reward_high"]
    assert (numbers["rollouts"], numbers["faults"]) == (4, 2)
    # The second task has too few rollouts to estimate pass@3.
    assert numbers["pass@3"] == 1.0


def test_a_missing_reward_is_not_zero():
    numbers = summary([[], []], config(2), seed="s")
    assert numbers == {"tasks": 2, "rollouts": 0, "faults": 4, "cuts": 0, "unreliable": 1}


def test_evaluations_run_before_the_first_step_and_after_the_last():
    due = [step for step in range(8) if config(every=3).due(step, 7)]
    assert due == [0, 3, 6, 7]


def losing(lost_trials: int, last: int = 1000):
    """Rollouts of which the first trials fail at both attempts, and all after the `last`."""

    async def roll(request: RolloutRequest) -> Episode:
        await asyncio.sleep(1.0)
        if not lost_trials < int(request.seed.split(":")[1]) <= last:
            return Episode(request.task).failed(Outcome.LOST, Fault.INFRA, "the engine died")
        return episode_of(request.task, 0)

    return roll


def test_a_group_judger_does_not_wait_for_lost_rollouts(tmp_path):
    async def roll(request: RolloutRequest) -> Episode:
        await asyncio.sleep(1.0)
        if int(request.seed.split(":")[1]) > 2:  # all samples of the task but two, however often they are retried
            return Episode(request.task).failed(Outcome.LOST, Fault.INFRA, "the engine died")
        return episode_of(request.task, 0)

    async def main():
        async with World(tmp_path, roll, compares=True, held_out={"h": tasks(1, "h")}) as world, asyncio.timeout(100):
            (group,) = world.env.open_evaluation(0, 3)
            await world.env.roll_all([group])
            assert sorted(e.reward.value for e in group.episodes.values()) == [0, 1]
            assert group.trials == 9

    simulate(main())


def test_lost_rollouts_of_an_evaluation_are_repeated_and_never_trained_on(tmp_path):
    async def main():
        world = World(tmp_path, losing(2), compares=True, held_out={"h": tasks(2, "h")})
        async with world, asyncio.timeout(100):
            groups = world.env.open_evaluation(7, 3)
            await world.env.roll_all(groups)
            assert [len(group.episodes) for group in groups] == [3, 3]
            again = world.env.open_evaluation(7, 3)
            assert [group.number for group in again] == [group.number for group in groups]
            await world.env.roll_all(again)
            stored = list(rollouts(world.ledger))
        assert len(stored) == 8, "nothing is repeated"
        assert {rollout.evaluated for rollout in stored} == {7}
        assert not any(rollout.episode.trainable or rollout.episode.in_baseline for rollout in stored)

    simulate(main())


def test_a_raising_rollout_of_an_evaluation_ends_the_others(tmp_path):
    cancelled = []

    async def roll(request: RolloutRequest) -> Episode:
        if request.task.id == "h/1":
            raise KeyError("a bug")
        try:
            await asyncio.sleep(1000)
        finally:
            cancelled.append(request.task.id)
        return episode_of(request.task, 0)

    async def main():
        async with World(tmp_path, roll, held_out={"h": tasks(3, "h")}) as world:
            with pytest.raises(KeyError, match="a bug"):
                await world.env.roll_all(world.env.open_evaluation(0, 1))
            assert sorted(cancelled) == ["h/0", "h/2"]

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


def test_evaluations_do_not_use_the_budget_and_are_completed_without_one(tmp_path):
    async def main():
        for again in (False, True):
            async with World(tmp_path, losing(1), budget=4, held_out={"h": tasks(2, "h")}) as world:
                groups = world.env.open_evaluation(0, 3)
                await world.env.roll_all(groups)
                assert [len(group.episodes) for group in groups] == [3, 3]
                assert world.env.book.has_budget(4) != again, "also if an earlier process made them"
                assert not world.env.book.has_budget(5)
                assert len(await world.producer.batch(1, 1)) == (not again)

    simulate(main())
