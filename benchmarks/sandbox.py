"""Sandbox: what a sandbox and a command in it cost, against the same command without one."""

import asyncio
import os
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.measure import Ratio
from loopwright.execution import Command, LocalExecutor
from loopwright.execution.sandbox import Bounds, Sandbox, sandbox_of
from loopwright.testing.executors import ignore

ROUNDS = 30
TRIAL_MS, COMMAND_MS = 150, 50
"""Of the 300 ms that a trial may cost, half are for the session and for collecting."""
BOUNDS = Bounds(cpu_s=600, memory_bytes=8 << 30, processes=512, disk_bytes=8 << 30)


async def once(sandbox: Sandbox, executor: LocalExecutor, root: Path, number: int) -> tuple[float, float]:
    """The milliseconds of a whole sandbox with one command in it, and those of the command."""
    directory = root / f"{type(sandbox).__name__}-{number}"
    directory.mkdir()
    start_s = time.perf_counter()
    async with AsyncExitStack() as stack:
        workspace = await stack.enter_async_context(sandbox.disk(directory)) / "workspace"
        workspace.mkdir()
        command = Command(
            argv=("/bin/true",),
            directory=workspace,
            environment={"PATH": os.defpath},
            stdout=root / "stdout",
            stderr=root / "stderr",
            marker=f"bench-{os.getpid()}-{directory.name}",
        )
        instance = await stack.enter_async_context(sandbox.open(workspace, allowed_urls=("http://127.0.0.1:8400",)))
        inside_s = time.perf_counter()
        completion = await executor.run(instance.wrap(command), ignore)
        command_s = time.perf_counter() - inside_s
        if completion.exit_code != 0:
            raise RuntimeError((root / "stderr").read_text())
    return (time.perf_counter() - start_s) * 1000, command_s * 1000


async def measure() -> dict[str, tuple[float, float]]:
    """The best time of each sandbox and of a command in it, measured in turns."""
    sandboxes = {name: sandbox_of(name, BOUNDS) for name in ("none", "bwrap")}
    executor = LocalExecutor()
    times_ms: dict[str, list[tuple[float, float]]] = {name: [] for name in sandboxes}
    with tempfile.TemporaryDirectory() as root:
        for number in range(ROUNDS):
            for name, sandbox in sandboxes.items():
                times_ms[name].append(await once(sandbox, executor, Path(root), number))
    await executor.close()
    return {name: (min(all_ms for all_ms, _ in each), min(ms for _, ms in each)) for name, each in times_ms.items()}


def run() -> list[Ratio]:
    """The milliseconds that a bubblewrap sandbox adds."""
    best = asyncio.run(measure())
    (bare_ms, bare_command_ms), (sandbox_ms, command_ms) = best["none"], best["bwrap"]
    detail = f"bare {bare_ms:.1f} ms"
    return [
        Ratio("sandbox: a bwrap sandbox with one command", sandbox_ms, TRIAL_MS, "ms", detail=detail),
        Ratio("sandbox: one command in it", command_ms, COMMAND_MS, "ms", detail=f"bare {bare_command_ms:.1f} ms"),
    ]
