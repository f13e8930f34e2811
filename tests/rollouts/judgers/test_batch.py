"""Batches: what arrives together is judged together, as one try, and each payload has its own verdict."""

import asyncio
from pathlib import Path

import pytest

from loopwright.core.reward import Reward
from loopwright.rollouts.judgers import JudgerDown, build_judger, parse_judger
from loopwright.rollouts.judgers.base import JudgeFailed, Payload
from loopwright.rollouts.judgers.batch import Batches
from loopwright.testing import simulate
from loopwright.testing.judgers import episode, verdicts
from tests.rollouts import judge_functions
from tests.rollouts.harness import timed
from tests.rollouts.judge_servers import serving
from tests.rollouts.judgers.test_judgers import FUNCTIONS, judged


def http(server, place="judge", **settings):
    return {"type": "http", "url": f"{server.url}/{place}", "batch": 4, "batch_wait_s": 0.0, "pause_s": 0, **settings}


def said(*answers):
    return [episode(answer) for answer in answers]


def bodies(server):
    return [body for _, body in server.requests]


def values(found):
    return [verdict.value if isinstance(verdict, Reward) else str(verdict) for verdict in found]


# -- over HTTP --------------------------------------------------------------------------------------------------


def test_l04_payloads_that_arrive_together_are_posted_as_one_array():
    with serving() as server:
        found = judged(http(server), Path(), *said(*"4545454"))
        sent = bodies(server)
    assert values(found) == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    assert sorted(map(len, sent)) == [3, 4]
    assert all(set(body) == {"answer", "label"} for batch in sent for body in batch)


def test_l04_without_a_batch_each_is_an_object():
    with serving() as server:
        judged(http(server, batch=1), Path(), *said("4", "5"))
        assert [type(body) for body in bodies(server)] == [dict, dict]


def test_l05_an_entry_without_a_verdict_costs_no_other_its_reward():
    with serving() as server:
        found = judged(http(server), Path(), *said("4", "unclear", "odd", "5"))
        assert len(server.requests) == 1  # neither is tried again: the server has spoken
    assert (found[0].value, found[3].value) == (1.0, 0.0)
    assert str(found[1]) == "judger 'http' gave no verdict: cannot tell"
    assert isinstance(found[2], JudgeFailed)


def test_l05_an_answer_that_is_no_json_costs_no_other_its_reward():
    with serving() as server:
        found = judged(http(server), Path(), *said("4", "\ud800", "5"))
        assert [len(body) for body in bodies(server)] == [2]
        (alone,) = judged(http(server), Path(), *said("\ud800"))
    assert (found[0].value, found[2].value) == (1.0, 0.0)
    assert "not JSON" in str(found[1])
    assert isinstance(alone, JudgeFailed)


def test_l04_a_batch_that_fails_is_tried_again_as_it_was():
    with serving() as server:
        server.broken = 2
        found = judged(http(server, retries=2), Path(), *said("4", "5"))
        first, second, third = bodies(server)
    assert values(found) == [1.0, 0.0]
    assert first == second == third


@pytest.mark.parametrize("text", ["[]", '[{"reward":1}]', '{"reward":1}', "1", "null"])
def test_l05_an_answer_of_another_length_is_no_verdict_for_any(text):
    with serving() as server:
        found = judged(http(server, f"answer?text={text}"), Path(), *said("4", "5"))
        assert len(server.requests) == 1
    assert all(isinstance(verdict, ValueError | TypeError) for verdict in found)


def test_a_batch_counts_as_one_try_for_the_breaker():
    async def main(server):
        judger = build_judger(parse_judger(http(server, "answer?text=no&status=500", retries=0, breaker=2)), Path())
        found = [await verdicts(judger, *said(*"4444")) for _ in range(3)]
        await judger.close()
        return found

    with serving() as server:
        first, second, third = asyncio.run(main(server))
        assert len(server.requests) == 2
    assert not any(isinstance(verdict, JudgerDown) for verdict in [*first, *second])
    assert all(isinstance(verdict, JudgerDown) for verdict in third)


# -- to a function ----------------------------------------------------------------------------------------------


def python(function, **settings):
    table = {"type": "python", "function": f"{FUNCTIONS}:{function}", "batch": 4, "batch_wait_s": 0.0}
    return {**table, "retries": 0, **settings}


def test_l04_a_handler_is_given_a_list_of_each_fact():
    judge_functions.CALLS.clear()
    assert values(judged(python("exact_each", weight=2.0), Path(), *said("4", "5", "4"))) == [2.0, 0.0, 2.0]
    assert judge_functions.CALLS == [("4", "5", "4")]


def test_l05_what_a_handler_returns_is_checked_entry_by_entry():
    found = judged(python("each_its_own"), Path(), *said("4", "unclear", "odd", "5"))
    assert (found[0].value, found[3].value) == (1.0, 1.0)
    assert str(found[1]) == "judger 'each_its_own' gave no verdict: RuntimeError: cannot tell"
    assert isinstance(found[2], TypeError)


def test_l04_a_handler_that_forgets_one_has_a_bug():
    (first, second) = judged(python("too_few_answers"), Path(), *said("4", "5"))
    assert isinstance(first, ValueError)
    assert "1 entries for 2 episodes" in str(second)


def test_parts_of_a_composed_judger_have_batches_of_their_own():
    judge_functions.CALLS.clear()
    table = {"type": "composed", "parts": [python("exact_each"), {"type": "length", "weight": -0.5}]}
    assert values(judged(table, Path(), *said("4", "5"))) == [0.5, -0.5]
    assert judge_functions.CALLS == [("4", "5")]


# -- gathering, in simulated time -------------------------------------------------------------------------------


class Judge:
    """Takes an hour for each batch, and remembers what was in it."""

    def __init__(self):
        self.began, self.ended = [], []

    async def __call__(self, payloads):
        self.began.append([payload.answer for payload in payloads])
        await asyncio.sleep(3600)
        self.ended.append(self.began[-1])
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
        found = await asyncio.gather(*early, *late)
        assert judge.began == [[1, 2, 3], [4, 5]]
        return [reward.value for reward in found]

    assert simulate(timed(main())) == ([1.0, 2.0, 3.0, 4.0, 5.0], 3660.0)


def test_who_leaves_is_left_out_and_a_batch_that_all_left_is_given_up():
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
        assert judge.ended == []
        third, fourth = ask(batches, 3, 4)
        await asyncio.sleep(100)
        third.cancel()
        return (await fourth).value, judge.ended

    assert simulate(main()) == (4.0, [[3, 4]])


def test_closing_fails_what_is_waited_for():
    async def main():
        batches = Batches(Judge(), 2, 60.0)
        waiting = ask(batches, 1, 2, 3)
        await asyncio.sleep(1)
        await batches.close()
        return await asyncio.gather(*waiting, return_exceptions=True)

    found, took_s = simulate(timed(main()))
    assert [str(error) for error in found] == ["the judger was closed"] * 3
    assert took_s < 60


def test_room_and_patience_count_batches():
    table = {"type": "http", "url": "http://x", "concurrency": 2, "retries": 0, "timeout_s": 5}
    alone, together = parse_judger(table), parse_judger({**table, "batch": 16, "batch_wait_s": 1.0})
    assert (alone.capacity(), together.capacity()) == (2, 32)
    assert (alone.total_timeout_s(), together.total_timeout_s()) == (5.0, 6.0)
