"""Judgers in one or several Ray actors on a real cluster: same results, and little data is sent."""

import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from loopwright.core.episode import Episode
from loopwright.core.task import Task
from loopwright.core.trial import Reward
from loopwright.engines.base import Sampling
from loopwright.engines.scripted import ScriptedConfig
from loopwright.rollouts.build import build_judger_client
from loopwright.rollouts.judgers import JudgerClient, JudgerDown, JudgeWorker, parse_judger
from loopwright.rollouts.judgers.base import JudgeFailed
from loopwright.rollouts.loops.base import SingleTurnConfig
from loopwright.rollouts.loops.worker import LoopWorker, RolloutRequest
from loopwright.rollouts.pools.local import LocalPool
from loopwright.rollouts.pools.ray.pool import RayPool
from loopwright.testing.executors import alive, appears, written_pid
from loopwright.testing.judgers import episode
from tests.rollouts.pools.ray_cluster import cluster

__all__ = ["cluster"]
pytestmark = pytest.mark.usefixtures("cluster")
FUNCTIONS = "tests.rollouts.judge_functions"
WORKERS = (1, 2)


def python(function, workers, **settings):
    table = {"type": "python", "function": f"{FUNCTIONS}:{function}", "workers": workers, "cpus": 0.1, "retries": 0}
    return {**table, **settings}


def use_judger(table, body, directory=Path()):
    async def main():
        client = build_judger_client(parse_judger(table), directory)
        await client.start()
        try:
            return await asyncio.wait_for(body(client), 100)
        finally:
            await client.close()

    return asyncio.run(main())


async def failure(client, *answers):
    with pytest.raises(JudgeFailed) as caught:
        await client.judge(episode(*answers))
    return caught.value


@pytest.mark.parametrize("workers", WORKERS)
def test_l01_verdicts_and_failures_equal_those_of_a_local_judger(workers, tmp_path):
    """One judger that behaves differently for each data source."""
    (tmp_path / "odd_judge.py").write_text(
        "class Odd(Exception):\n    def __init__(self, a, b):\n        super().__init__(f'{a} and {b}')\n"
        "def odd(answer):\n    raise Odd('one', 'other')\n"
    )
    kinds = ["exact", "parts", "fail", "leave", "returns_none", "returns_nan", "hang_async", "odd"]
    routes = {kind: python(kind, 0, timeout_s=0.2 if kind == "hang_async" else 60.0) for kind in kinds}
    routes["odd"]["function"] = "odd_judge:odd"
    for route in routes.values():
        del route["workers"]
    table = {"type": "composed", "routes": routes, "cpus": 0.1}

    async def body(client):
        return await client.judge_group([episode("4", data_source=kind) for kind in [*kinds, "unheard of"]])

    near, far = (use_judger({**table, "workers": count}, body, tmp_path) for count in (0, workers))
    assert [type(verdict) for verdict in far] == [type(verdict) for verdict in near]
    assert [str(verdict) for verdict in far] == [str(verdict) for verdict in near]
    assert [isinstance(verdict, Reward) for verdict in far] == [True, True, *[False] * 7]
    assert "Odd: one and other" in str(far[7])


@pytest.mark.parametrize("workers", WORKERS)
def test_l01_settings_of_the_guard_apply_too(workers):
    async def body(client):
        first = await failure(client)
        downs = [await failure(client) for _ in range(4 * workers)]
        return first, downs[-1]

    first, down = use_judger(python("fail", workers, breaker=1, cooldown_s=1000), body)
    assert str(first) == "judger 'fail' gave no verdict: RuntimeError: broken on purpose"
    assert isinstance(down, JudgerDown)
    assert 900 < down.retry_in_s <= 1000
    assert "the last: RuntimeError: broken on purpose" in str(down)


@pytest.mark.parametrize("workers", WORKERS)
def test_l04_groups_and_batches_are_judged_remotely(workers):
    async def body(client):
        return await client.judge_group([episode("four"), episode("4"), episode("vier")])

    ranking = {"type": "ranking", "function": f"{FUNCTIONS}:shortest", "workers": workers, "cpus": 0.1}
    assert [verdict.value for verdict in use_judger(ranking, body)] == [-4.0, -1.0, -4.0]
    assert [verdict.value for verdict in use_judger(python("exact_each", workers, batch=4), body)] == [0.0, 1.0, 0.0]


def test_l05_a_judger_that_dies_with_its_actor_gives_no_verdict_and_is_replaced():
    async def body(client):
        error = await failure(client, "die")
        return error, await client.judge(episode("4"))

    error, reward = use_judger(python("exact_or_die", 1), body)
    assert "gave no verdict: WorkerLost: " in str(error)
    assert reward.value == 1.0


def test_a_command_does_not_outlive_the_actor_that_ran_it(tmp_path):
    pid, actor = tmp_path / "pid", tmp_path / "actor"
    script = (
        f"import os, time; open({str(actor)!r}, 'w').write(f'{{os.getppid()}}\\n'); "
        f"open({str(pid)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(1000)"
    )
    table = {"type": "command", "command": [sys.executable, "-IS", "-c", script], "workers": 1, "cpus": 0.1}

    async def body(client):
        flight = asyncio.ensure_future(client.judge(episode()))
        await appears(pid)
        first = written_pid(pid)
        os.kill(written_pid(actor), signal.SIGKILL)
        while alive(first):
            await asyncio.sleep(0.01)
        flight.cancel()
        await asyncio.wait((flight,))

    use_judger(table, body)


# -- L06 --------------------------------------------------------------------------------------------------------


class Weighed(RayPool):
    """Records how many bytes were sent to its actors in each call."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.sizes = []

    async def _await_answer(self, actor, method, data, *limits):
        if method is actor.handle:
            self.sizes.append(len(data))
        return await super()._await_answer(actor, method, data, *limits)


@pytest.mark.parametrize("workers", WORKERS)
def test_l06_the_bytes_sent_do_not_depend_on_the_episodes_length(workers):
    async def main():
        config = parse_judger(python("exact", workers))
        pool = Weighed(partial(JudgeWorker.build, config, Path()), workers=workers, cpus=0.1, name="judger")
        client = JudgerClient(pool, config)
        await client.start()
        short = episode("4")
        long_ = Episode(short.task, (*short.nodes[:2], *[short.nodes[1]] * 10_000, short.nodes[2]))
        rewards = [await client.judge(short), await client.judge(long_)]
        await client.close()
        return rewards, pool.sizes

    rewards, (first, second) = asyncio.run(main())
    assert rewards == [Reward(1.0, {"exact": 1.0})] * 2
    assert abs(first - second) <= 8  # the remaining time is part of it
    assert second < 400


# -- L02 --------------------------------------------------------------------------------------------------------


def test_l02_loops_that_sample_differently_share_one_built_judger():
    """Training and evaluation have separate loops with different sampling, and one judger."""

    def loop(**sampling):
        engine = ScriptedConfig(replies=("4",), slip=0.5)
        return LocalPool(partial(LoopWorker.build, SingleTurnConfig(sampling=Sampling(**sampling)), engine, Path()))

    task = Task("t", ({"role": "user", "content": "2 + 2?"},), "4", "sums")

    async def rewards(loop, verdicts, count):
        await loop.start()
        episodes = await asyncio.gather(*(loop.call(RolloutRequest(task, str(seed))) for seed in range(count)))
        rewards_list = await asyncio.gather(*map(verdicts.judge, episodes))
        await loop.close()
        return [reward.value for reward in rewards_list]

    async def main():
        config = parse_judger(python("exact_by", 1))
        pool = RayPool(partial(JudgeWorker.build, config, Path()), workers=1, cpus=0.1, name="judger")
        training, evaluation = JudgerClient(pool, config), JudgerClient(pool, config)
        await training.start()
        await evaluation.start()
        rewards_list = await asyncio.gather(
            rewards(loop(temperature=1.0), training, 40), rewards(loop(temperature=0.0), evaluation, 8)
        )
        pids = {(await user.judge(episode("4"))).parts["pid"] for user in (training, evaluation)}
        await training.close()
        return *rewards_list, pids

    trained, evaluated, pids = asyncio.run(main())
    assert {0.0, 1.0} == set(trained)
    assert evaluated == [1.0] * 8
    assert len(pids) == 1
