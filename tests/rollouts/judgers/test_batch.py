"""Batches: payloads that arrive together are judged in one attempt, each with its own verdict."""

import asyncio
from pathlib import Path

import pytest

from loopwright.core.trial import Reward
from loopwright.rollouts.judgers import JudgerDown, build_judger, parse_judger
from loopwright.rollouts.judgers.base import JudgeFailed, Payload
from loopwright.rollouts.judgers.batch import Batches
from loopwright.testing import simulate
from loopwright.testing.judgers import episode, verdicts
from tests.rollouts import judge_functions
from tests.rollouts.harness import timed
from tests.rollouts.judge_servers import serving
from tests.rollouts.judgers.test_judgers import FUNCTIONS, judge_all


def http(server, place="judge", **settings):
    return {"type": "http", "url": f"{server.url}/{place}", "batch": 4, "batch_wait_s": 0.0, "pause_s": 0, **settings}


def episodes_of(*answers):
    return [episode(answer) for answer in answers]


def bodies(server):
    return [body for _, body in server.requests]


def values(results):
    return [verdict.value if isinstance(verdict, Reward) else str(verdict) for verdict in results]


# -- over HTTP --------------------------------------------------------------------------------------------------


def test_l04_payloads_that_arrive_together_are_posted_as_one_array():
    with serving() as server:
        results = judge_all(http(server), Path(), *episodes_of(*"4545454"))
        arrays = bodies(server)
    assert values(results) == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    assert sorted(map(len, arrays)) == [3, 4]
    assert all(set(body) == {"answer", "label"} for batch in arrays for body in batch)


def test_l04_without_batching_each_payload_is_an_object():
    with serving() as server:
        judge_all(http(server, batch=1), Path(), *episodes_of("4", "5"))
        assert [type(body) for body in bodies(server)] == [dict, dict]


def test_l05_an_entry_without_a_verdict_does_not_affect_the_others():
    with serving() as server:
        results = judge_all(http(server), Path(), *episodes_of("4", "unclear", "odd", "5"))
        assert len(server.requests) == 1  # neither is retried: the server has answered
    assert (results[0].value, results[3].value) == (1.0, 0.0)
    assert str(results[1]) == "judger 'http' gave no verdict: cannot tell"
    assert isinstance(results[2], JudgeFailed)


def test_l05_an_unencodable_answer_does_not_affect_the_others():
    with serving() as server:
        results = judge_all(http(server), Path(), *episodes_of("4", "\ud800", "5"))
        assert [len(body) for body in bodies(server)] == [2]
        (alone,) = judge_all(http(server), Path(), *episodes_of("\ud800"))
    assert (results[0].value, results[2].value) == (1.0, 0.0)
    assert "not JSON" in str(results[1])
    assert isinstance(alone, JudgeFailed)


def test_l04_a_failed_batch_is_retried_unchanged():
    with serving() as server:
        server.broken = 2
        results = judge_all(http(server, retries=2), Path(), *episodes_of("4", "5"))
        first, second, third = bodies(server)
    assert values(results) == [1.0, 0.0]
    assert first == second == third


@pytest.mark.parametrize("text", ["[]", '[{"reward":1}]', '{"reward":1}', "1", "null"])
def test_l05_a_response_of_another_length_gives_no_verdicts(text):
    with serving() as server:
        results = judge_all(http(server, f"answer?text={text}"), Path(), *episodes_of("4", "5"))
        assert len(server.requests) == 1
    assert all(isinstance(verdict, ValueError | TypeError) for verdict in results)


def test_a_batch_counts_as_one_attempt_for_the_breaker():
    async def main(server):
        judger = build_judger(parse_judger(http(server, "answer?text=no&status=500", retries=0, breaker=2)), Path())
        results = [await verdicts(judger, *episodes_of(*"4444")) for _ in range(3)]
        await judger.close()
        return results

    with serving() as server:
        first, second, third = asyncio.run(main(server))
        assert len(server.requests) == 2
    assert not any(isinstance(verdict, JudgerDown) for verdict in [*first, *second])
    assert all(isinstance(verdict, JudgerDown) for verdict in third)


# -- to a function ----------------------------------------------------------------------------------------------


def python(function, **settings):
    table = {"type": "python", "function": f"{FUNCTIONS}:{function}", "batch": 4, "batch_wait_s": 0.0}
    return {**table, "retries": 0, **settings}


def test_l04_a_batch_function_gets_a_list_of_each_fact():
    judge_functions.CALLS.clear()
    assert values(judge_all(python("exact_each", weight=2.0), Path(), *episodes_of("4", "5", "4"))) == [2.0, 0.0, 2.0]
    assert judge_functions.CALLS == [("4", "5", "4")]


def test_l05_return_values_are_checked_entry_by_entry():
    results = judge_all(python("each_its_own"), Path(), *episodes_of("4", "unclear", "odd", "5"))
    assert (results[0].value, results[3].value) == (1.0, 1.0)
    assert str(results[1]) == "judger 'each_its_own' gave no verdict: RuntimeError: cannot tell"
    assert isinstance(results[2], TypeError)


def test_l04_a_batch_function_must_answer_for_each_entry():
    (first, second) = judge_all(python("too_few_answers"), Path(), *episodes_of("4", "5"))
    assert isinstance(first, ValueError)
    assert "1 entries for 2 episodes" in str(second)


def test_parts_of_a_composed_judger_have_separate_batches():
    judge_functions.CALLS.clear()
    table = {"type": "composed", "parts": [python("exact_each"), {"type": "length", "weight": -0.5}]}
    assert values(judge_all(table, Path(), *episodes_of("4", "5"))) == [0.5, -0.5]
    assert judge_functions.CALLS == [("4", "5")]


# -- gathering, in simulated time -------------------------------------------------------------------------------


class Judge:
    """Takes an hour for each batch, and records its contents."""

    def __init__(self):
        self.began, self.finished = [], []

    async def __call__(self, payloads):
        self.began.append([payload.answer for payload in payloads])
        await asyncio.sleep(3600)
        self.finished.append(self.began[-1])
        return [Reward(float(payload.answer)) for payload in payloads]


def ask(batches, *numbers):
    return [asyncio.ensure_future(batches.judge(Payload({"answer": number}))) for number in numbers]


def test_a_full_batch_does_not_wait_and_the_rest_waits_for_more():
    async def main():
        judge = Judge()
        batches = Batches(judge, 3, 60.0)
        early = ask(batches, 1, 2, 3, 4)
        await asyncio.sleep(1)
        assert judge.began == [[1, 2, 3]]
        late = ask(batches, 5)
        results = await asyncio.gather(*early, *late)
        assert judge.began == [[1, 2, 3], [4, 5]]
        return [reward.value for reward in results]

    assert simulate(timed(main())) == ([1.0, 2.0, 3.0, 4.0, 5.0], 3660.0)


def test_cancelled_payloads_are_left_out_and_an_empty_batch_is_dropped():
    async def main():
        judge = Judge()
        batches = Batches(judge, 3, 60.0)
        first, second = ask(batches, 1, 2)
        await asyncio.sleep(1)
        first.cancel()
        await asyncio.sleep(100)
        assert judge.began == [[2]]
        second.cancel()
        await asyncio.wait((first, second))
        await asyncio.sleep(10_000)
        assert judge.finished == []
        third, fourth = ask(batches, 3, 4)
        await asyncio.sleep(100)
        third.cancel()
        return (await fourth).value, judge.finished

    assert simulate(main()) == (4.0, [[3, 4]])


def test_closing_fails_pending_verdicts():
    async def main():
        batches = Batches(Judge(), 2, 60.0)
        waiting = ask(batches, 1, 2, 3)
        await asyncio.sleep(1)
        await batches.close()
        return await asyncio.gather(*waiting, return_exceptions=True)

    results, took_s = simulate(timed(main()))
    assert [str(error) for error in results] == ["the judger was closed"] * 3
    assert took_s < 60


def test_concurrency_and_timeout_apply_to_batches():
    table = {"type": "http", "url": "http://x", "concurrency": 2, "retries": 0, "timeout_s": 5}
    alone, together = parse_judger(table), parse_judger({**table, "batch": 16, "batch_wait_s": 1.0})
    assert (alone.capacity(), together.capacity()) == (2, 32)
    assert (alone.total_timeout_s(), together.total_timeout_s()) == (5.0, 6.0)
