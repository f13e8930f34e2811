"""`python -m tests.survival.raylets`: a batch on two raylets, one of which is killed halfway."""

import asyncio
import logging
import sys
import time

import ray
from ray._private import utils
from ray.cluster_utils import Cluster

from loopwright.execution.ray.connection import RayConnection
from loopwright.rollouts.pools.ray.launch import check_resources, cluster_nodes
from loopwright.rollouts.pools.ray.pool import RayPool
from loopwright.rollouts.pools.resources import ResourceRequest, ResourcesError
from loopwright.testing.pools import Probe

CALLS = 200


def require(condition: bool) -> None:
    """An assertion that `python -O` keeps."""
    if not condition:
        raise RuntimeError("the test failed here")


def failure(request):
    try:
        check_resources([request])
    except ResourcesError as error:
        return str(error)
    return ""


async def batch(cluster, node) -> None:
    pool = RayPool(Probe, workers=4, cpus=0.5, strategy="SPREAD", grace_s=1.0)
    await pool.start()
    calls = [asyncio.ensure_future(pool.call(("sleep", 0.2 + n / 50), timeout_s=90)) for n in range(CALLS)]
    await asyncio.sleep(0.6)
    await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
    answers = await asyncio.gather(*calls)
    require(answers == [0.2 + n / 50 for n in range(CALLS)])
    require(pool.in_flight == 0)
    require(len(await pool.publish("an update", timeout_s=60)) == 4)  # All four are back, on the node that is left.
    await pool.close()


def main() -> int:
    # Otherwise every ray.init() of this machine would connect to the cluster of this test.
    utils.write_ray_address = lambda *_, **__: None
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    node = cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    with RayConnection():
        require(len(cluster_nodes()) == 2)
        # The cluster has four CPUs, but each worker must fit on one node.
        require("no node is large enough for one worker of 'wide'" in failure(ResourceRequest("wide", 1, 3)))
        require("no node has 3 CPUs" in failure(ResourceRequest("near", 3, 1, strategy="STRICT_PACK")))
        require("one node for each of the 3" in failure(ResourceRequest("far", 3, 0.1, strategy="STRICT_SPREAD")))
        require(failure(ResourceRequest("fair", 2, 2, strategy="STRICT_SPREAD")) == "")
        begin_s = time.monotonic()
        asyncio.run(batch(cluster, node))
        print(f"{CALLS} calls in {time.monotonic() - begin_s:.1f} s, none lost")
    require(ray.is_initialized())  # It was not started by RayConnection.
    ray.shutdown()
    cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
