"""Contracts of the pools: L01, L03, L07, L10, L11 and L12, on a real Ray."""

import ast
import asyncio
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
from ray._private.state import actors

import loopwright
from loopwright.execution.ray.connection import RayConnection
from loopwright.rollouts.pools.actor_host import mark_file
from loopwright.rollouts.pools.base import WorkerLost
from loopwright.rollouts.pools.local import LocalPool
from loopwright.rollouts.pools.ray.launch import check_group, check_resources, cluster_nodes, release, reserve
from loopwright.rollouts.pools.resources import ResourceRequest, ResourcesError
from loopwright.testing.pools import Probe
from tests.rollouts.pools.ray_cluster import cluster, kill, pids, pool_of

__all__ = ["cluster"]
pytestmark = pytest.mark.usefixtures("cluster")


def use(pool, body):
    async def main():
        await pool.start()
        try:
            return await asyncio.wait_for(body(pool), 100)
        finally:
            await pool.close()

    return asyncio.run(main())


class Blocker(Probe):
    async def block(self, seconds):
        time.sleep(seconds)

    async def shaky(self, argument):
        number, chance, seed = argument
        if random.Random(f"{seed}:{number}:{time.time_ns()}").random() < chance:
            raise ConnectionError(f"a fault in {number}")
        return number


def test_l01_pools_have_the_same_public_attributes():
    def public(pool):
        return {name for name in dir(pool) if not name.startswith("_")}

    assert public(LocalPool(Probe)) == public(pool_of(1)) == public(pool_of(3))


def test_l01_large_arrays_arrive_writable():
    async def body(pool):
        array = await pool.call(("echo", np.zeros(500_000)))
        array += 1
        assert array.sum() == 500_000

    use(pool_of(1), body)


def test_l01_modules_beside_the_scenario_can_be_imported(tmp_path, monkeypatch):
    (tmp_path / "my_worker.py").write_text(
        "from loopwright.rollouts.pools.base import Worker\n"
        "class Odd(Exception): pass\n"
        "class Mine(Worker):\n"
        "    async def handle(self, request):\n"
        "        if request: raise Odd('as requested')\n"
        "        return 'mine'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from my_worker import Mine, Odd

    async def body(pool):
        assert await pool.call(0) == "mine"
        with pytest.raises(Odd, match="as requested"):
            await pool.call(1)

    use(pool_of(1, Mine, import_dir=tmp_path), body)


def test_l01_values_that_cannot_be_sent_are_named():
    async def body(pool):
        with pytest.raises(TypeError, match="cannot be sent to another process"):
            await pool.call(("echo", (n for n in range(3))))
        assert pool.in_flight == 0

    use(pool_of(1), body)


def test_l03_an_oversized_pool_fails_in_seconds_with_the_numbers():
    has = sum(node.total["CPU"] for node in cluster_nodes())
    start_s = time.monotonic()
    with pytest.raises(ResourcesError) as caught:
        use(pool_of(3, cpus=has, memory_bytes=1 << 30, name="greedy"), None)
    assert time.monotonic() - start_s < 5
    for part in (
        "'greedy' requests 3 workers",
        f"{has:g} CPUs and 1 GiB each",
        f"The Ray cluster has {has:g} CPUs",
        "in use",
    ):
        assert part in str(caught.value)
    with pytest.raises(ResourcesError, match="no node is large enough for one worker of 'vast'"):
        check_resources([ResourceRequest("vast", 1, 0.1, 1 << 50)])


def test_l03_resources_that_others_hold_fail_after_a_bounded_wait():
    half = max(node.total["CPU"] for node in cluster_nodes()) * 0.6

    async def main():
        group = await reserve(ResourceRequest("first", 1, half))
        try:
            with pytest.raises(ResourcesError, match="other processes hold the resources") as caught:
                await reserve(ResourceRequest("second", 1, half), timeout_s=1.5)
            assert "'second' requests 1 worker" in str(caught.value)
            assert "Ray says" in str(caught.value)
        finally:
            release(group)

    asyncio.run(main())


def test_l07_killed_actors_lose_nothing():
    async def body(pool):
        first = await pids(pool, 2)
        calls = [asyncio.ensure_future(pool.call(("sleep", 0.5 + n / 100))) for n in range(40)]
        await asyncio.sleep(0.2)
        kill(first[0])
        assert await asyncio.gather(*calls) == [0.5 + n / 100 for n in range(40)]
        assert pool.in_flight == 0
        second = await pids(pool, 2)
        assert first[0] not in second
        assert first[1] in second

    use(pool_of(2), body)


def test_l07_the_last_actor_is_replaced_too_and_gets_the_latest_update():
    async def body(pool):
        await pool.publish("v1")
        await pool.publish("v2")
        (pid,) = await pids(pool, 1)
        call = asyncio.ensure_future(pool.call(("sleep", 0.5)))
        await asyncio.sleep(0.1)
        kill(pid)
        assert await call == 0.5
        assert await pool.call(("latest_update", None)) == "v2"

    use(pool_of(1), body)


def test_l07_a_call_that_kills_its_worker_twice_is_lost_alone():
    async def body(pool):
        others = [asyncio.ensure_future(pool.call(("sleep", 0.1))) for _ in range(4)]
        await asyncio.gather(*others)
        with pytest.raises(WorkerLost, match="two workers died during this call"):
            await pool.call(("die", None))
        assert await pool.call(("echo", 1)) == 1

    use(pool_of(2, Mortal), body)


class Mortal(Probe):
    async def die(self, argument):
        import os

        kill(os.getpid())


def test_l07_a_worker_that_never_returns_is_killed_and_replaced_and_other_calls_continue():
    async def body(pool):
        before = await pids(pool, 2)
        marks.extend(mark_file(actor.mark_name) for actor in pool._router.backends)
        neighbours = [asyncio.ensure_future(pool.call(("sleep", 0.3), timeout_s=0.5)) for _ in range(6)]
        start_s = time.monotonic()
        with pytest.raises(TimeoutError, match="no answer within"):
            await pool.call(("block", 600), timeout_s=0.5)
        assert time.monotonic() - start_s < 8
        assert await asyncio.gather(*neighbours) == [0.3] * 6, "late, since another call blocked their worker"
        assert len(set(before) & set(await pids(pool, 2))) == 1

    marks = []
    use(pool_of(2, Blocker), body)
    assert [mark.exists() for mark in marks] == [False] * 2


def test_l07_a_replacement_that_cannot_be_built_fails_the_call(tmp_path):
    class Once(Probe):
        def __init__(self) -> None:
            super().__init__()
            with (tmp_path / "built").open("x"):
                pass

    async def body(pool):
        kill(await pool.call(("pid", None)))
        with pytest.raises(WorkerLost, match=r"no worker left.*built"):
            await pool.call(("sleep", 5), timeout_s=100)

    use(pool_of(1, Once), body)


@pytest.mark.parametrize("by_name", [False, True])
def test_l10_an_existing_group_is_used_from_the_start_bundle(by_name):
    async def main():
        group = ray.util.placement_group([{"CPU": 0.1}, {"CPU": 0.1}, {"CPU": 0.2}], "SPREAD", name=f"given-{by_name}")

        def of(name, workers, cpus, start):
            if not by_name:
                given = {"placement_group": group, "start_bundle": start}
                return pool_of(workers, cpus=cpus, name=name, wait_s=2.0, **given)
            request = ResourceRequest(name, workers, cpus, group=f"given-{by_name}", start_bundle=start)
            return pool_of(workers, request=request, wait_s=2.0)

        pools = [of("loop", 2, 0.1, 0), of("judger", 1, 0.2, 2)]
        try:
            for pool in pools:
                await pool.start()
                assert await pool.call(("echo", 1)) == 1
            with pytest.raises(ResourcesError, match="bundles are in use"):
                await of("other", 1, 0.2, 2).start()
        finally:
            for pool in pools:
                await pool.close()
            release(group)

    asyncio.run(main())


def test_l10_a_group_that_does_not_exist_is_named_with_those_that_do():
    group = ray.util.placement_group([{"CPU": 0.1}], name="theirs")
    try:
        with pytest.raises(
            ResourcesError, match=r"no placement group is named 'mine'.*'theirs'.*lifetime=\"detached\""
        ):
            check_resources([ResourceRequest("loop", 1, 0.1, group="mine")])
    finally:
        release(group)


@pytest.mark.parametrize(
    ("request_", "start", "message"),
    [
        (ResourceRequest("loop", 2, 0.1), 1, "starting at bundle 1, but the placement group has 2 bundles"),
        (ResourceRequest("loop", 1, 0.5), 0, "bundle 0 of the placement group has only 0.1 CPUs"),
        (ResourceRequest("loop", 1, 0.1, 1 << 20), 1, "bundle 1 of the placement group has only 0.1 CPUs and 0 B"),
    ],
)
def test_l10_each_bundle_is_checked(request_, start, message):
    async def main():
        group = await reserve(ResourceRequest("given", 2, 0.1))
        try:
            check_group(replace(request_, start_bundle=start), group)
        finally:
            release(group)

    with pytest.raises(ResourcesError, match=message):
        asyncio.run(main())


def actor_pids() -> list[int]:
    """The process ids of all live actors of this cluster."""
    return [actor["Pid"] for actor in actors().values() if actor["State"] == "ALIVE"]


def test_l10_no_actor_without_resources():
    """The router runs in the caller: a pool of two has two actors, each with its own CPUs."""

    async def body(pool):
        assert set(await pids(pool, 2)) == set(actor_pids())
        assert pool.in_flight == 0

    use(pool_of(2, cpus=0.2), body)


def test_l11_the_count_falls_when_an_actor_dies():
    async def body(pool):
        (pid,) = await pids(pool, 1)
        calls = [asyncio.ensure_future(pool.call(("sleep", 0.2), timeout_s=30)) for _ in range(20)]
        await asyncio.sleep(0.05)
        assert pool.in_flight == 20
        kill(pid)
        assert await asyncio.gather(*calls) == [0.2] * 20
        assert pool.in_flight == 0

    use(pool_of(1), body)


def test_l11_calls_beyond_the_concurrency_wait_here_and_keep_their_deadline():
    async def body(pool):
        long = [asyncio.ensure_future(pool.call(("sleep", 1.5))) for _ in range(2)]
        await asyncio.sleep(0.1)
        with pytest.raises(TimeoutError):
            await pool.call(("echo", 1), timeout_s=0.3)
        assert pool.in_flight == 2
        assert await pool.call(("echo", 2), timeout_s=10) == 2
        await asyncio.gather(*long)

    use(pool_of(1, max_concurrency=2), body)


def test_l12_ray_get_is_not_used():
    root = Path(loopwright.__file__).parent / "rollouts"
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("get", "wait"):
                assert not (isinstance(node.value, ast.Name) and node.value.id == "ray"), f"{file}:{node.lineno}"


def test_l12_calls_do_not_block_the_event_loop():
    async def body(pool):
        calls = asyncio.gather(*(pool.call(("sleep", 1.0)) for _ in range(20)))
        ticks = 0
        while not calls.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert ticks > 30

    use(pool_of(1), body)


def test_l12_ray_ends_with_its_last_user_only():
    with RayConnection():
        assert ray.is_initialized()
    assert ray.is_initialized()


@pytest.mark.slow
def test_l07_one_in_twenty_of_2000_calls_fails_and_actors_die_but_none_is_lost():
    async def one(pool, number):
        for _ in range(50):
            try:
                return await pool.call(("shaky", (number, 0.05, 1)), timeout_s=60)
            except (ConnectionError, TimeoutError):
                continue
        return None

    async def body(pool):
        limit = asyncio.Semaphore(64)

        async def limited(number):
            async with limit:
                return await one(pool, number)

        calls = [asyncio.ensure_future(limited(number)) for number in range(2000)]
        for _ in range(3):
            await asyncio.sleep(0.3)
            kill(random.choice(await pids(pool, 2)))
        assert await asyncio.gather(*calls) == list(range(2000))
        assert pool.in_flight == 0

    use(pool_of(2, Blocker), body)


def test_l10_a_local_cluster_listens_on_loopback_only_and_keeps_our_sigterm_handler():
    script = (
        "import signal, ray\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "from loopwright.execution.ray.connection import RayConnection\n"
        "from loopwright.rollouts.pools.ray.launch import cluster_nodes\n"
        "with RayConnection(cpus=1):\n"
        "    print([node.name for node in cluster_nodes()], signal.getsignal(signal.SIGTERM).name)\n"
        "print(ray.is_initialized())\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment)
    assert (result.stdout, result.stderr) == ("['127.0.0.1'] SIG_IGN\nFalse\n", "")
