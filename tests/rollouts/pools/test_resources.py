"""What fits into a cluster, and the message when it does not."""

import pytest

from loopwright.rollouts.pools.resources import (
    ClusterNode,
    PlacementConfig,
    ResourceRequest,
    find_shortage,
    format_resources,
    overlap_problems,
    placement_error,
)

GIB = 1 << 30
NODES = [
    ClusterNode("a", {"CPU": 4, "memory": 8 * GIB, "GPU": 2, "tpu": 1}, {"CPU": 1, "memory": 8 * GIB, "GPU": 2}),
    ClusterNode("b", {"CPU": 2, "memory": 8 * GIB}, {"CPU": 2, "memory": 2 * GIB}),
]


@pytest.mark.parametrize(
    ("requests", "reason"),
    [
        ([ResourceRequest("loop", 6, 1)], None),
        ([ResourceRequest("loop", 60, 0.1)], None),
        ([ResourceRequest("loop", 7, 1)], "only 6 workers of 'loop' fit"),
        ([ResourceRequest("loop", 1, 5)], "no node is large enough for one worker of 'loop'"),
        ([ResourceRequest("loop", 3, 1, 5 * GIB, strategy="SPREAD")], "only 2 workers of 'loop' fit"),
        ([ResourceRequest("loop", 4, 1), ResourceRequest("judger", 3, 1)], "together they need 7 CPUs"),
        ([ResourceRequest("loop", 4, 1, strategy="STRICT_PACK")], None),
        (
            [ResourceRequest("loop", 5, 1, strategy="STRICT_PACK")],
            "no node has 5 CPUs, and STRICT_PACK puts all workers on one node",
        ),
        ([ResourceRequest("loop", 2, 1, strategy="STRICT_SPREAD")], None),
        ([ResourceRequest("loop", 3, 1, strategy="STRICT_SPREAD")], "STRICT_SPREAD needs one node for each of the 3"),
        ([ResourceRequest("loop", 2, 3, strategy="STRICT_SPREAD")], "each of the 2 workers, and 1 have room"),
        ([ResourceRequest("engines", 4, 0.5, gpus=0.5)], None),
        ([ResourceRequest("engines", 3, 0.5, gpus=1)], "only 2 workers of 'engines' fit"),
        ([ResourceRequest("loop", 1, 1, gpus=2), ResourceRequest("engines", 1, gpus=1)], "together they need"),
        ([ResourceRequest("engines", 1, 0.5, resources={"tpu": 2})], "no node is large enough for one worker"),
        ([ResourceRequest("engines", 1, 0.5, resources={"tpuu": 1})], "no node is large enough for one worker"),
    ],
)
def test_l03_a_shortage_is_found_before_anything_starts(requests, reason):
    shortage = find_shortage(requests, NODES)
    assert (shortage is None) if reason is None else (reason in shortage)


def test_l03_the_error_lists_requests_capacity_and_usage():
    requests = [ResourceRequest("loop", 4, 2, GIB), ResourceRequest("judger", 1, gpus=1, resources={"tpu": 2})]
    text = str(placement_error(requests, NODES, "it is full"))
    assert "'loop' requests 4 workers of 2 CPUs and 1 GiB each (8 CPUs and 4 GiB)" in text
    assert "'judger' requests 1 worker of 1 CPU, 1 GPU and 2 tpu" in text
    assert "The Ray cluster has 6 CPUs, 2 GPUs, 16 GiB and 1 tpu, of which 3 CPUs, 0 GPUs, 6 GiB and 1 tpu" in text
    assert "Request fewer" in text


def test_l10_a_worker_without_resources_cannot_be_requested():
    with pytest.raises(ValueError, match="greater than zero"):
        ResourceRequest("loop", 1, 0)


def test_l10_two_pools_cannot_use_the_same_bundle():
    def at(name, workers, start, group="mine"):
        return ResourceRequest(name, workers, group=group, start_bundle=start)

    assert overlap_problems([at("loop", 2, 0), at("judger", 2, 2), at("engines", 9, 1, None)]) == []
    (problem,) = overlap_problems([at("loop", 2, 0), at("judger", 2, 1), at("other", 2, 1, "others")])
    assert problem.key == "judger.start_bundle"
    assert "bundle 1 of 'mine' is used by 'loop' too; start at bundle 2" in problem.message


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"resources": {"GPU": 1}}, "use the key 'gpus'"),
        ({"resources": {"tpu": 0}}, "0 is not greater than zero"),
        ({"strategy": "STRICT"}, "STRICT_PACK"),
        ({"start_bundle": -1}, "greater than or equal to 0"),
    ],
)
def test_l03_wrong_placements_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        PlacementConfig.model_validate(table)


def test_amounts_are_readable():
    assert format_resources({"CPU": 0.5}) == "0.5 CPUs"
    assert format_resources({"tpu": 2, "memory": 1536, "GPU": 1, "CPU": 1}) == "1 CPU, 1 GPU, 1.5 KiB and 2 tpu"
