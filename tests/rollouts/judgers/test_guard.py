"""The guard under a simulated clock: timeouts, retries, concurrency, circuit breaker."""

import asyncio
import pickle
from itertools import pairwise
from random import Random

import pytest

from loopwright.core.trial import Reward
from loopwright.rollouts.judgers.base import BatchJudger, GroupJudger, JudgeFailed, Judger, JudgerConfig
from loopwright.rollouts.judgers.guard import Guard, JudgerDown, guard_judger
from loopwright.rollouts.judgers.verdict_parsing import BadVerdict, as_reward
from loopwright.rollouts.pools.steps import StepInterrupted
from loopwright.testing import simulate
from loopwright.testing.judgers import episode, verdicts
from tests.rollouts.harness import timed


def config(**settings):
    return JudgerConfig(type="mine", **settings)


class Flaky:
    """Fails a number of times, then succeeds, after a delay."""

    def __init__(self, failures, takes_s=0.0):
        self.failures, self.takes_s = failures, takes_s
        self.starts, self.now, self.most = [], 0, 0

    async def __call__(self):
        self.starts.append(asyncio.get_running_loop().time())
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.takes_s)
            if len(self.starts) <= self.failures:
                raise ConnectionError("no answer")
            return 1.0
        finally:
            self.now -= 1


async def failing(guard, judge):
    with pytest.raises(JudgeFailed) as caught:
        await guard.run(judge)
    return caught.value


def test_a_failed_attempt_is_retried_after_twice_the_pause():
    async def main():
        judge = Flaky(3)
        assert await Guard(config(retries=3, pause_s=1.0), Random(1)).run(judge) == 1.0
        return judge.starts

    starts = simulate(main())
    again = simulate(main())
    pauses = [late - early for early, late in pairwise(starts)]
    assert starts == again
    assert all(0.5 * 2**n <= pause <= 1.5 * 2**n for n, pause in enumerate(pauses))


def test_after_the_last_attempt_the_cause_is_reported():
    async def main():
        return await failing(Guard(config(retries=1)), Flaky(9))

    error = simulate(main())
    assert str(error) == "judger 'mine' gave no verdict in 2 tries: ConnectionError: no answer"
    assert isinstance(error.__cause__, ConnectionError)


def test_an_attempt_that_takes_too_long_is_cancelled():
    async def main():
        return await failing(Guard(config(retries=1, timeout_s=5, pause_s=0)), Flaky(0, takes_s=1000))

    error, took_s = simulate(timed(main()))
    assert "longer than 5 s" in str(error)
    assert isinstance(error.__cause__, TimeoutError)
    assert took_s == pytest.approx(10.0)
    assert took_s <= config(retries=1, timeout_s=5, pause_s=0).total_timeout_s() + 1e-6


def test_waiting_for_a_slot_does_not_count_towards_the_timeout():
    async def main():
        judge, guard = Flaky(0, takes_s=4), Guard(config(concurrency=2, timeout_s=5))
        await asyncio.gather(*(guard.run(judge) for _ in range(10)))
        return judge.most

    assert simulate(timed(main())) == (2, 20.0)


def test_an_invalid_verdict_is_not_retried():
    calls = []

    async def judge():
        calls.append(1)
        return as_reward(float("nan"), "mine")

    async def main():
        with pytest.raises(BadVerdict):
            await Guard(config(retries=5)).run(judge)

    simulate(main())
    assert len(calls) == 1


def test_the_breaker_opens_probes_once_and_closes():
    async def main():
        judge, guard = Flaky(4, takes_s=1), Guard(config(retries=0, breaker=3, cooldown_s=60))
        for _ in range(3):
            await failing(guard, judge)
        down = await failing(guard, judge)
        assert isinstance(down, JudgerDown)
        assert "down" in str(down)
        assert "3 consecutive failures, the last: ConnectionError: no answer" in str(down)
        assert 0 < down.retry_in_s <= 60
        assert len(judge.starts) == 3  # the judger was not called

        await asyncio.sleep(down.retry_in_s)
        probe, bystander = await asyncio.gather(failing(guard, judge), failing(guard, judge))
        assert not isinstance(probe, JudgerDown)
        assert isinstance(bystander, JudgerDown)
        assert isinstance(await failing(guard, judge), JudgerDown)  # the probe failed: open again

        await asyncio.sleep(60)
        assert await guard.run(judge) == 1.0
        assert await asyncio.gather(guard.run(judge), guard.run(judge)) == [1.0, 1.0]
        return len(judge.starts)

    assert simulate(main()) == 7


def test_a_cancelled_probe_has_no_effect():
    async def main():
        judge, guard = Flaky(1, takes_s=1), Guard(config(retries=0, breaker=1, cooldown_s=10))
        await failing(guard, judge)
        await asyncio.sleep(10)
        probe = asyncio.ensure_future(guard.run(judge))
        await asyncio.sleep(0.5)
        probe.cancel()
        with pytest.raises(asyncio.CancelledError):
            await probe
        return await guard.run(judge)

    assert simulate(main()) == 1.0


def sort_and_count(payload):
    """Changes all that it is given; the reward is how much of it was there."""
    payload.label.sort()
    payload.episode.task.label.append(0)
    payload.messages[0]["content"] += "!"
    payload.task.append({})
    return Reward(float(len(payload.episode.task.label) + len(payload.messages[0]["content"]) + len(payload.task)))


class SortOne(Judger):
    needs = ("label", "messages", "task", "episode")

    async def judge(self, payload):
        return sort_and_count(payload)


class SortBatch(BatchJudger):
    needs = SortOne.needs

    async def judge_batch(self, payloads):
        return [sort_and_count(payload) for payload in payloads]


class SortGroup(GroupJudger):
    needs = SortOne.needs

    async def judge_group(self, payloads):
        return [sort_and_count(payload) for payload in payloads]


@pytest.mark.parametrize("kind", [SortOne, SortBatch, SortGroup])
def test_what_a_judger_changes_reaches_no_other_verdict_and_no_record(kind):
    judged = episode(label=[2, 1])

    async def main():
        judger = guard_judger(kind())
        try:
            return [verdict.value for _ in range(2) for verdict in await verdicts(judger, judged, judged)]
        finally:
            await judger.close()

    assert len(set(asyncio.run(main()))) == 1
    assert judged == episode(label=[2, 1])


class LeaveOne(Judger):
    async def judge(self, payload):
        raise SystemExit(3)


class LeaveBatch(BatchJudger):
    async def judge_batch(self, payloads):
        raise SystemExit(3)


@pytest.mark.parametrize("kind", [LeaveOne, LeaveBatch])
def test_a_class_that_exits_loses_only_its_own_verdicts(kind):
    async def main():
        judger = guard_judger(kind())
        try:
            return await verdicts(judger, episode(), episode())
        finally:
            await judger.close()

    results = simulate(main())
    assert [type(verdict) for verdict in results] == [JudgeFailed, JudgeFailed]
    assert all("SystemExit(3)" in str(verdict) for verdict in results)


def test_an_attempt_that_blocks_the_event_loop_is_not_repeated():
    attempts = []

    async def block():
        attempts.append(1)
        raise StepInterrupted

    async def main():
        return await failing(Guard(config(retries=3)), block)

    assert "blocked the event loop" in str(simulate(main()))
    assert len(attempts) == 1


def test_failures_can_be_pickled():
    error = pickle.loads(pickle.dumps(JudgerDown("down", 3.5)))
    assert (str(error), error.retry_in_s) == ("down", 3.5)
