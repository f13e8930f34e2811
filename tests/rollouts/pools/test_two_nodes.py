"""Rollouts on a cluster of two Ray nodes with declared GPUs and custom resources."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("nodes")
    command = [sys.executable, "-m", "tests.rollouts.pools.two_nodes", str(directory)]
    # Has both nodes listen on loopback only, at addresses of their own.
    environment = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=550, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((directory / "facts.json").read_text())


def test_l10_the_working_directory_and_packages_are_sent_to_other_nodes(facts):
    """Given `runtime_env`, code and files beside the scenario are read from the copy, and a package is importable."""
    run = facts["shipped"]
    assert (run["code"], run["trials"], run["outcomes"]) == (0, 24, ["ok"]), run["error"]
    assert run["values"] == ["shipped"]
    assert run["notes"] == ["a note"]
    assert run["directories"] == run["modules"] != [run["scenario_dir"]]


def test_l10_workers_run_where_their_custom_resources_are(facts):
    loops = [line.split() for line in facts["shipped"]["loops"]]
    assert [(node, devices) for _, node, devices in loops] == [("127.0.0.2", "-")] * 3


def test_l10_engines_with_gpus_are_shared_by_all_loop_workers(facts):
    """Given two engines for three loop workers, only the two actors sample, each with its GPU, on its node."""
    engines = [line.split() for line in facts["shipped"]["engines"]]
    assert sorted((node, devices) for _, node, devices in engines) == [("127.0.0.1", "0"), ("127.0.0.2", "0")]
    assert not {line.split()[0] for line in facts["shipped"]["loops"]} & {pid for pid, *_ in engines}


def test_t11_gateways_on_several_nodes_advertise_their_own_addresses(facts):
    run = facts["gateways"]
    assert (run["code"], run["outcomes"]) == (0, ["ok"]), run["error"]
    assert {host.partition(":")[0] for host in run["hosts"]} == {"127.0.0.1", "127.0.0.2"}
    assert sorted(run["hosts"].values()) == [12, 12]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpus", "'loop' requests 2 workers of 1 CPU and 3 GPUs each"),
        ("resource", "'loop' requests 1 worker of 1 CPU and 1 tpu"),
        ("group", "no placement group is named 'theirs'"),
        ("spread", "STRICT_SPREAD needs one node for each of the 3 workers, and 2 have room"),
    ],
)
def test_l03_verify_names_what_the_cluster_can_never_provide(facts, name, message):
    assert facts["impossible"][name]["code"] == 2
    assert message in facts["impossible"][name]["error"]


def test_l03_a_run_that_can_never_be_placed_ends_before_anything_is_launched(facts):
    assert facts["impossible"]["run"]["code"] == 1
    assert "STRICT_SPREAD needs one node" in facts["impossible"]["run"]["error"]
