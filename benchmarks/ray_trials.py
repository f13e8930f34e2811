"""Ray: a thousand trials that do nothing, against bare `ray.remote` tasks that do the same."""

import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import ray

from benchmarks.function import nothing
from benchmarks.measure import Ratio, best_of
from benchmarks.spine import campaigns
from loopwright.execution.ray.connection import RayConnection

TRIALS, CPUS, ROUNDS = 1_000, 2, 3
SCENARIO = f"""
name = "no-op"
[system]
type = "ray"
parallel = {CPUS}
[[run]]
name = "nothing"
agent = {{ type = "grid" }}
reward = {{ type = "identity", metrics = ["y"] }}
[run.workload]
%s
[run.workload.args]
n = {list(range(TRIALS))}
"""
COMMAND = 'type = "command"\ncommand = "true {n}"\nmetrics = { y = { resource = "wall_s" } }'
FUNCTION = f'type = "python"\nfunction = "function:nothing"\npath = ["{Path(__file__).parent}"]'


def command(n: int, directory: str) -> int:
    """What a trial does, written by hand: a directory, a process, its output in files."""
    place = Path(tempfile.mkdtemp(dir=directory))
    with (place / "stdout").open("wb") as out, (place / "stderr").open("wb") as err:
        return subprocess.run(["true", str(n)], cwd=place, stdout=out, stderr=err, check=True).returncode


def tasks(work: Callable[..., object], *arguments: str) -> None:
    """All of them as bare tasks."""
    remote: Any = ray.remote(num_cpus=1)(work)
    ray.get([remote.remote(n, *arguments) for n in range(TRIALS)])


def run() -> list[Ratio]:
    """Commands and functions, each over the whole spine: ledger, directories, metrics.

    Both sides run in tasks, and so in the same pool of processes, which the first round has warmed for both.
    """
    ratios = []
    # All directories are deleted at the end, so that no deletion disturbs what is measured next.
    with RayConnection(cpus=CPUS), tempfile.TemporaryDirectory() as directory, ExitStack() as open_campaigns:
        peers = {
            "commands": (COMMAND, True, partial(tasks, command, directory)),
            "functions": (FUNCTION, True, partial(tasks, nothing)),
            "functions, trials in memory,": (FUNCTION, False, partial(tasks, nothing)),
        }
        for name, (workload, on_disk, bare) in peers.items():
            campaign = open_campaigns.enter_context(campaigns(SCENARIO % workload, TRIALS, on_disk=on_disk))
            best = best_of(ROUNDS, {"ours": campaign, "bare": bare})
            detail = f"{TRIALS / best['ours']:,.0f} per second, bare tasks {TRIALS / best['bare']:,.0f}"
            ratio = best["bare"] / best["ours"]
            # In memory shows how much of a trial is the disk, to which bare functions do not write.
            goal = 0.7 if on_disk else None
            ratios.append(Ratio(f"ray: 1,000 {name} against bare tasks", ratio, goal, at_least=True, detail=detail))
    return ratios


if __name__ == "__main__":
    for one in run():
        print(one)
