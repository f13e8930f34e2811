"""What fits into a cluster, and the message when it does not."""

import pytest

from loopwright.rollouts.pools.resources import (
    ClusterNode,
    ResourceRequest,
    find_shortage,
    format_resources,
    placement_error,
)

GIB = 1 << 30
NODES = [ClusterNode("a", 4, 8 * GIB, 1, 8 * GIB), ClusterNode("b", 2, 8 * GIB, 2, 2 * GIB)]


@pytest.mark.parametrize(
    ("requests", "strategy", "reason"),
    [
        ([ResourceRequest("loop", 6, 1)], "PACK", None),
        ([ResourceRequest("loop", 60, 0.1)], "PACK", None),
        ([ResourceRequest("loop", 7, 1)], "PACK", "only 6 workers of 'loop' fit"),
        ([ResourceRequest("loop", 1, 5)], "PACK", "no node is large enough for one worker of 'loop'"),
        ([ResourceRequest("loop", 3, 1, 5 * GIB)], "SPREAD", "only 2 workers of 'loop' fit"),
        ([ResourceRequest("loop", 4, 1), ResourceRequest("judger", 3, 1)], "PACK", "together they need 7 CPUs"),
        ([ResourceRequest("loop", 4, 1)], "STRICT_PACK", None),
        (
            [ResourceRequest("loop", 5, 1)],
            "STRICT_PACK",
            "no node has 5 CPUs, and STRICT_PACK puts all workers on one node",
        ),
        ([ResourceRequest("loop", 2, 1)], "STRICT_SPREAD", None),
        ([ResourceRequest("loop", 3, 1)], "STRICT_SPREAD", "STRICT_SPREAD needs one node for each of the 3"),
    ],
)
def test_l03_a_shortage_is_found_before_anything_starts(requests, strategy, reason):
    shortage = find_shortage(requests, NODES, strategy)
    assert (shortage is None) if reason is None else (reason in shortage)


def test_l03_the_error_lists_requests_capacity_and_usage():
    requests = [ResourceRequest("loop", 4, 2, GIB), ResourceRequest("judger", 1)]
    text = str(placement_error(requests, NODES, "it is full"))
    assert "'loop' requests 4 workers of 2 CPUs and 1 GiB each (8 CPUs and 4 GiB)" in text
    assert "'judger' requests 1 worker of 1 CPU" in text
    assert "The Ray cluster has 6 CPUs and 16 GiB, of which 3 CPUs and 6 GiB are in use" in text
    assert "Request fewer" in text


def test_l10_a_worker_without_resources_cannot_be_requested():
    with pytest.raises(ValueError, match="greater than zero"):
        ResourceRequest("loop", 1, 0)


def test_amounts_are_readable():
    assert format_resources(0.5, None) == "0.5 CPUs"
    assert format_resources(1, 1536) == "1 CPU and 1.5 KiB"
