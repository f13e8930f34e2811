"""Shared by the tests on Ray: a cluster for the session, pools on it, and SIGKILL."""

import asyncio
import os
import signal

import pytest

from loopwright.rollouts.pools.base import Pool
from loopwright.rollouts.pools.ray.pool import RayPool
from loopwright.testing.pools import Probe


@pytest.fixture(scope="session")
def cluster():
    from loopwright.execution.ray.connection import RayConnection

    with RayConnection(cpus=8) as connection:
        yield connection


def pool_of(workers, build=Probe, **options):
    return RayPool(build, **{"workers": workers, "cpus": 0.1, "grace_s": 1.0, "start_timeout_s": 60.0, **options})


async def pids(pool: Pool, workers: int) -> list[int]:
    """The process of each worker."""
    processes: set[int] = set()
    while len(processes) < workers:
        processes |= set(await asyncio.gather(*(pool.call(("pid", None)) for _ in range(2 * workers))))
    return sorted(processes)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
