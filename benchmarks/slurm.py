"""Slurm: two hundred trials that do nothing, eight in flight, against a shell loop that polls as often as we do."""

import os
import subprocess
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from tests.slurm.cluster import Cluster, is_installed

from benchmarks.measure import Ratio, best_of
from benchmarks.spine import campaigns
from loopwright.execution.slurm.queue import Queue

TRIALS, PARALLEL, POLL_S = 200, 8, 1
ROUNDS = 2
SCENARIO = f"""
name = "no-op"
[system]
type = "slurm"
parallel = {PARALLEL}
poll_s = {POLL_S}
[[run]]
name = "true"
agent = {{ type = "grid" }}
reward = {{ type = "negative", metrics = ["seconds"] }}
[run.workload]
type = "command"
command = "true {{n}}"
metrics = {{ seconds = {{ resource = "wall_s" }} }}
[run.workload.args]
n = {list(range(TRIALS))}
"""
LOOP = f"""
submitted=0
while :; do
  running=$(squeue --noheader --user=$(id -u) | wc -l)
  [ $running = 0 ] && [ $submitted = {TRIALS} ] && exit
  while [ $running -lt {PARALLEL} ] && [ $submitted -lt {TRIALS} ]; do
    sbatch --parsable --output=/dev/null --wrap true >/dev/null
    submitted=$((submitted + 1)) running=$((running + 1))
  done
  sleep {POLL_S}
done
"""


def run() -> list[Ratio]:
    """The whole spine against the loop, and how often the queue was asked."""
    if not is_installed():
        print("slurm: skipped, since Slurm is not installed or we are not root")
        return []
    directory = Path(tempfile.mkdtemp(prefix="loopwright-slurm-"))
    cluster = Cluster(directory)
    cluster.start()
    os.environ |= cluster.environment
    queries, ask = [], Queue.jobs

    async def counted(queue: Queue) -> object:
        queries.append(time.monotonic())
        return await ask(queue)

    Queue.jobs = counted  # type: ignore[method-assign, assignment]
    try:
        with campaigns(SCENARIO, TRIALS, on_disk=True) as campaign:
            best = best_of(ROUNDS, {"ours": campaign, "loop": lambda: subprocess.run(["sh", "-c", LOOP], check=True)})
    finally:
        Queue.jobs = ask  # type: ignore[method-assign]
        cluster.leave()
    gap_s = min(later - earlier for earlier, later in pairwise(queries))
    detail = f"{best['ours']:.1f} s, loop {best['loop']:.1f} s"
    return [
        Ratio("slurm: 200 jobs, 8 in flight, against a shell loop", best["ours"] / best["loop"], 1.3, detail=detail),
        Ratio("slurm: shortest time between two queries", gap_s, 0.99, unit="s", at_least=True),
    ]
