"""What fits into a cluster, and the words when it does not."""

import pytest

from loopwright.rollouts.pools.resources import (
    ClusterNode,
    ResourceRequest,
    find_shortage,
    format_resources,
    placement_error,
)

GIB = 1 << 30
TWO = [ClusterNode("a", 4, 8 * GIB, 1, 8 * GIB), ClusterNode("b", 2, 8 * GIB, 2, 2 * GIB)]


@pytest.mark.parametrize(
    ("asks", "strategy", "why"),
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
            "no node has 5 CPUs, and STRICT_PACK wants all workers on one",
        ),
        ([ResourceRequest("loop", 2, 1)], "STRICT_SPREAD", None),
        ([ResourceRequest("loop", 3, 1)], "STRICT_SPREAD", "there are 3 workers, and STRICT_SPREAD wants each"),
    ],
)
def test_l03_a_shortage_is_found_before_anything_starts(asks, strategy, why):
    found = find_shortage(asks, TWO, strategy)
    assert (found is None) if why is None else (why in found)


def test_l03_the_refusal_names_who_asked_what_there_is_and_what_is_taken():
    asks = [ResourceRequest("loop", 4, 2, GIB), ResourceRequest("judger", 1)]
    text = str(placement_error(asks, TWO, "it is full"))
    assert "'loop' asks for 4 workers of 2 CPUs and 1 GiB each (8 CPUs and 4 GiB)" in text
    assert "'judger' asks for 1 worker of 1 CPU" in text
    assert "The Ray cluster has 6 CPUs and 16 GiB, of which 3 CPUs and 6 GiB are taken" in text
    assert "Ask for fewer" in text


def test_l10_a_worker_without_resources_cannot_be_asked_for():
    with pytest.raises(ValueError, match="greater than zero"):
        ResourceRequest("loop", 1, 0)


def test_amounts_are_readable():
    assert format_resources(0.5, None) == "0.5 CPUs"
    assert format_resources(1, 1536) == "1 CPU and 1.5 KiB"
