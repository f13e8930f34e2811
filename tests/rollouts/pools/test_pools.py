"""Local and remote pools pass the same suite."""

import pytest

from loopwright.rollouts.pools.local import LocalPool
from loopwright.testing.pools import PoolContract
from tests.rollouts.pools.ray_cluster import cluster, pool_of

__all__ = ["cluster"]


class TestLocalPool(PoolContract):
    def make_pool(self, build):
        return LocalPool(build, grace_s=1.0)


@pytest.mark.usefixtures("cluster")
class TestOneActor(PoolContract):
    def make_pool(self, build):
        return pool_of(1, build)


@pytest.mark.usefixtures("cluster")
class TestManyActors(PoolContract):
    def make_pool(self, build):
        return pool_of(2, build)
