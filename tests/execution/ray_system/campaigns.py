"""Campaigns on two Ray nodes, as a user runs them, while things go wrong: `python -m …campaigns NAME DIRECTORY`.

In a process of its own, since a process has one Ray, and the tests of rollouts have another.
"""

import json
import os
import signal
import sys
from pathlib import Path

import ray
from ray._private import utils
from ray.cluster_utils import Cluster

from loopwright.execution.ray.connection import RayConnection
from loopwright.ledger.ledger import Ledger
from tests.survival.campaign import Campaign, end_of, wait_for

NODE = {"num_cpus": 4, "num_gpus": 4}
SCENARIO = """
name = "on-ray"
[system]
type = "ray"
parallel = 3
strategy = "SPREAD"
{system}
[[run]]
name = "work"
agent = {{ type = "grid" }}
reward = {{ type = "identity", metrics = ["y"] }}
[run.workload]
{workload}
[run.workload.args]
n = [1, 2, 3, 4, 5, 6]
"""
COMMAND = """
type = "command"
files = ["work.sh"]
command = "./work.sh {n}"
metrics = { y = { regex = 'y: (\\d+)' } }
gpus = 1
"""
WORK = """#!/bin/sh
setsid sleep 1000 > /dev/null 2>&1 &
echo "$CUDA_VISIBLE_DEVICES" > gpu
touch {directory}/began-$1
while [ $1 != 1 ] && [ ! -e {directory}/gate ]; do sleep 0.05; done
echo "y: $1"
"""
WRITE_TIMES = 'sleep 0.3\necho "$CUDA_VISIBLE_DEVICES $begin $(date +%s%N)" > times\n'
FUNCTION = "def work(n):\n    open('made', 'w').write(str(n))\n    print('called')\n    return {'y': n}\n"


def attempts(campaign: Campaign) -> dict[int, int]:
    with Ledger.read(campaign.ledger) as ledger:
        return {trial.number: len(ledger.attempts(trial.number)) for trial in ledger.trials()}


def campaign(directory: Path, system: str = "", workload: str = COMMAND) -> Campaign:
    scenario = SCENARIO.format(system=system, workload=workload)
    return Campaign(directory, scenario, work=WORK.replace("{directory}", str(directory)))


def survive(directory: Path, cluster: Cluster) -> None:
    """kill -9 of the driver, then a node lost in the resumed run: no trial is lost, and nothing runs afterwards."""
    one = campaign(directory)
    process = one.start()
    wait_for(lambda: process.poll() is not None or len(list(directory.glob("began-*"))) >= 4)
    process.kill()
    process.communicate()
    wait_for(lambda: not one.left_running())
    for path in directory.glob("began-*"):
        path.unlink()
    process = one.start("resume")
    wait_for(lambda: process.poll() is not None or len(list(directory.glob("began-*"))) >= 3)
    cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
    (directory / "gate").touch()
    end = end_of(process)
    print(end.out, end.err)
    trials = one.trials()
    counts = attempts(one)
    facts = {
        "code": end.code,
        "numbers": [trial.number for trial in trials],
        "outcomes": sorted({str(trial.outcome) for trial in trials}),
        "most_attempts": max(counts.values()),
        "first": counts[1],
        "left": one.left_running(),
        "gpus": sorted({path.read_text().strip() for path in one.output.glob("work/trials/*/gpu")}),
    }
    (directory / "facts.json").write_text(json.dumps(facts))


def interrupt(directory: Path, cluster: Cluster) -> None:
    """Ctrl-C and resume: nothing is left behind, and no two trials had a GPU at the same time."""
    one = campaign(directory, "resources = { head = 1 }")
    work = directory / "work.sh"
    work.write_text(work.read_text().replace("setsid", "begin=$(date +%s%N)\nsetsid") + WRITE_TIMES)
    process = one.start()
    wait_for(lambda: process.poll() is not None or len(list(directory.glob("began-*"))) >= 4)
    os.killpg(process.pid, signal.SIGINT)
    end = end_of(process)
    print(end.out, end.err)
    with RayConnection():
        wait_for(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])
    facts = {"interrupted": end.code, "left": one.left_running()}
    (directory / "gate").touch()
    end = one.call("resume")
    print(end.out, end.err)
    times = [path.read_text().split() for path in one.output.glob("work/trials/*/times")]
    trials = one.trials()
    facts |= {
        "code": end.code,
        "numbers": [trial.number for trial in trials],
        "outcomes": sorted({str(trial.outcome) for trial in trials}),
        "times": sorted((device, int(begin), int(finish)) for device, begin, finish in times),
    }
    (directory / "facts.json").write_text(json.dumps(facts))


def copy(directory: Path, cluster: Cluster) -> None:
    """Nodes that share no files: commands and functions, their output and what they wrote."""
    facts = {}
    (directory / "gate").touch()
    (directory / "mine.py").write_text(FUNCTION)
    for name, workload in (("command", COMMAND), ("python", 'type = "python"\nfunction = "mine:work"')):
        one = campaign(directory, 'files = "copy"', workload)
        one.output = directory / name
        one.ledger = one.output / "work" / "ledger.db"
        end = one.call()
        print(end.out, end.err)
        made = sorted(path.name for path in (one.output / "work/trials/2").iterdir())
        facts[name] = {"code": end.code, "files": made, "ok": [t.outcome == "ok" for t in one.trials()]}
    (directory / "large.sh").write_text("")
    one = campaign(directory, "wait_s = 0\nresources = { tpu = 2 }")
    one.output = directory / "impossible"
    facts["impossible"] = one.call().err
    (directory / "facts.json").write_text(json.dumps(facts))


def main(name: str, directory: Path) -> None:
    # Otherwise every ray.init() of this machine would connect to the cluster of this test.
    utils.write_ray_address = lambda *_, **__: None
    cluster = Cluster(
        initialize_head=True, head_node_args={**NODE, "resources": {"head": 4}, "include_dashboard": False}
    )
    try:
        cluster.add_node(**NODE)
        os.environ["RAY_ADDRESS"] = cluster.address
        {part.__name__: part for part in (survive, copy, interrupt)}[name](directory, cluster)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
