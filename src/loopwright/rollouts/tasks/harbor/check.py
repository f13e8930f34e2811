"""Checks that tasks are valid: the solution must score 1 and the initial state 0, verified as in real runs."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
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
from loopwright.rollouts.tasks.harbor.source import TaskDirectory, TaskLocator
from loopwright.rollouts.tasks.sources import TasksError

_OUTPUT_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """The test results of a task for its initial state and for its solution; None if it has no solution."""

    directory: TaskDirectory
    initial: VerifierReport
    solved: VerifierReport | None

    @property
    def problems(self) -> list[str]:
        """Why the task is not valid."""
        expected_rewards = [("the initial state", self.initial, 0.0), ("its solution", self.solved, 1.0)]
        problems = []
        for name, report, expected in expected_rewards:
            if report is None:
                continue
            if "error" in report:
                output = f" ({report['output']})" if report.get("output") else ""
                problems.append(f"{name}: {report['error']}{output}")
                continue
            rewards = report["rewards"]
            reward = rewards.get("reward", sum(rewards.values()))
            if reward != expected:
                problems.append(f"{name} scores {reward:g}, not {expected:g}")
        return problems


async def check_tasks(directories: Sequence[TaskDirectory], sandbox: Sandbox, *, jobs: int) -> AsyncIterator[TaskCheck]:
    """Check tasks, `jobs` at a time, and yield each result when it is ready."""
    slots, reaper = asyncio.Semaphore(jobs), Reaper("tasks")
    reaper.start()
    executor = LocalExecutor(parallel=jobs, output_bytes=_OUTPUT_BYTES)

    async def check(number: int, directory: TaskDirectory) -> TaskCheck:
        async with slots:
            verify_state = partial(_verify_state, directory, sandbox, executor, reaper.directory)
            marker = f"{reaper.marker}.{number}"
            initial = await verify_state(f"{marker}u", solve_first=False)
            task = directory.task
            has_solution = task is not None and task.solution(task.steps[0]) is not None
            solved = await verify_state(f"{marker}s", solve_first=True) if has_solution else None
            return TaskCheck(directory, initial, solved)

    checks = [asyncio.ensure_future(check(number, directory)) for number, directory in enumerate(directories)]
    try:
        for result in asyncio.as_completed(checks):
            yield await result
    finally:
        for running in checks:
            running.cancel()
        await asyncio.gather(*checks, return_exceptions=True)
        await executor.close()
        reaper.close()


async def _verify_state(
    directory: TaskDirectory, sandbox: Sandbox, executor: Executor, root: Path, marker: str, *, solve_first: bool
) -> VerifierReport:
    workspace = Path(tempfile.mkdtemp(dir=root, prefix="workspace-"))
    task = Task(directory.id, (), extra={"local_task_path": str(directory.path)})
    try:
        prepared = await asyncio.to_thread(prepare, task, workspace, TaskLocator(root))
        if prepared is None or not prepared.task.has_tests:
            return {"error": "it has no tests/test.sh"}
        async with sandbox.open(workspace, mount_at=prepared.layout.workdir, hide=prepared.hide) as instance:
            reports: list[VerifierReport] = []
            for step in prepared.task.steps:
                await asyncio.to_thread(stage, prepared, step, workspace)
                if solve_first and (problem := await solve(prepared, step, instance, executor, root, marker=marker)):
                    return {"error": problem}
                reports.append(await verify(prepared, step, instance, executor, root, marker=marker))
                if not step.allows_next(reports[-1]):
                    break
            return combine_reports(prepared, reports)
    except (TasksError, SandboxError, LaunchError) as error:
        return {"error": str(error)}
    finally:
        await run_in_thread(remove, workspace)
