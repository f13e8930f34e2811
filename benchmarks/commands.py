"""Commands: two hundred trials that do nothing, against a bare asyncio loop that starts the same processes."""

import asyncio
import os

from benchmarks.measure import Ratio, best_of
from benchmarks.spine import campaigns

TRIALS, PARALLEL = 200, 2
ROUNDS = 12
SCENARIO = f"""
name = "no-op"
[system]
parallel = {PARALLEL}
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


def bare() -> None:
    """Start the processes and wait for them, two at a time, and nothing else."""

    async def worker(numbers: list[int]) -> None:
        while numbers:
            process = await asyncio.create_subprocess_exec("true", str(numbers.pop()), env=os.environ)
            await process.wait()

    async def all_of_them() -> None:
        numbers = list(range(TRIALS))
        await asyncio.gather(*(worker(numbers) for _ in range(PARALLEL)))

    asyncio.run(all_of_them())


def run() -> list[Ratio]:
    """The whole spine against the bare loop."""
    with campaigns(SCENARIO, TRIALS) as campaign:
        campaign()
        bare()
        best = best_of(ROUNDS, {"ours": campaign, "bare": bare})
    ours_ms, bare_ms = best["ours"] / TRIALS * 1000, best["bare"] / TRIALS * 1000
    detail = f"{ours_ms:.2f} ms a trial, bare {bare_ms:.2f} ms"
    return [Ratio("commands: 200 trials against a bare asyncio loop", ours_ms / bare_ms, 2, detail=detail)]
