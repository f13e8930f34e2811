"""Evaluations: mean reward and pass@k over tasks, and what is said where rollouts were lost."""

from itertools import combinations
from statistics import fmean

import pytest

from loopwright.rollouts.evaluation import EvalConfig, summary


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
