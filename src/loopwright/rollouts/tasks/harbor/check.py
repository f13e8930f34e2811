"""Whether tasks can be trusted: a task's own solution scores 1 and the untouched state 0, by the way of real runs."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loopwright.core.errors import LaunchError
from loopwright.core.task import Task
from loopwright.execution.base import Executor
from loopwright.execution.local.executor import LocalExecutor
from loopwright.execution.local.reaper import Reaper
from loopwright.execution.sandbox import Sandbox, SandboxError
from loopwright.execution.sandbox.files import remove, run_in_thread
from loopwright.rollouts.remote.verify import VerifierReport, combine_reports, prepare, solve, stage, verify
from loopwright.rollouts.tasks.base import TasksError
from loopwright.rollouts.tasks.harbor.source import TaskDirectory, TaskLocator

_OUTPUT_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """What the tests of a task gave for the state it begins with and for its solution; None where it has none."""

    found: TaskDirectory
    untouched: VerifierReport
    solved: VerifierReport | None

    @property
    def problems(self) -> list[str]:
        """Why it cannot be trusted."""
        wanted = [("the untouched state", self.untouched, 0.0), ("its solution", self.solved, 1.0)]
        return [why for name, said, reward in wanted if said is not None and (why := _unlike(name, said, reward))]


def _unlike(name: str, said: VerifierReport, reward: float) -> str:
    if "error" in said:
        return f"{name}: {said['error']}" + (f" ({said['output']})" if said.get("output") else "")
    given = said["rewards"]
    value = given.get("reward", sum(given.values()))
    return "" if value == reward else f"{name} scores {value:g}, not {reward:g}"


async def check(found: Sequence[TaskDirectory], sandbox: Sandbox, *, jobs: int) -> AsyncIterator[TaskCheck]:
    """Check tasks, so many at a time, and give them as they are done."""
    async with _place(jobs) as (executor, reaper):
        slots = asyncio.Semaphore(jobs)

        async def one(number: int, each: TaskDirectory) -> TaskCheck:
            async with slots:
                attempt = partial(_attempt, each, sandbox, executor, reaper.directory)
                marker = f"{reaper.marker}.{number}"
                untouched = await attempt(f"{marker}u", solving=False)
                solvable = each.task is not None and each.task.solution(each.task.steps[0]) is not None
                return TaskCheck(each, untouched, await attempt(f"{marker}s", solving=True) if solvable else None)

        flights = [asyncio.ensure_future(one(number, each)) for number, each in enumerate(found)]
        try:
            for flight in asyncio.as_completed(flights):
                yield await flight
        finally:
            for each in flights:
                each.cancel()
            await asyncio.gather(*flights, return_exceptions=True)


@asynccontextmanager
async def _place(jobs: int) -> AsyncIterator[tuple[Executor, Reaper]]:
    reaper = Reaper("tasks")
    reaper.start()
    executor = LocalExecutor(parallel=jobs, output_bytes=_OUTPUT_BYTES)
    try:
        yield executor, reaper
    finally:
        await executor.close()
        reaper.close()


async def _attempt(
    found: TaskDirectory, sandbox: Sandbox, executor: Executor, root: Path, marker: str, *, solving: bool
) -> VerifierReport:
    workspace = Path(tempfile.mkdtemp(dir=root, prefix="workspace-"))
    task = Task(found.id, (), extra={"local_task_path": str(found.path)})
    try:
        prepared = await asyncio.to_thread(prepare, task, workspace, TaskLocator(root))
        if prepared is None or not prepared.tested:
            return {"error": "it has no tests/test.sh"}
        async with sandbox.open(workspace, mount_at=prepared.workdir, hide=prepared.hide) as instance:
            said: list[VerifierReport] = []
            for step in prepared.steps:
                await asyncio.to_thread(stage, prepared, step, workspace)
                if solving and (problem := await solve(prepared, step, instance, executor, root, marker=marker)):
                    return {"error": problem}
                said.append(await verify(prepared, step, instance, executor, root, marker=marker))
                if not step.goes_on(said[-1]):
                    break
            return combine_reports(prepared, said)
    except (TasksError, SandboxError, LaunchError) as error:
        return {"error": str(error)}
    finally:
        await run_in_thread(remove, workspace)
