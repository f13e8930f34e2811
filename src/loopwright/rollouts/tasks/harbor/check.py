"""Checks that tasks are valid: the solution must score 1, the initial state and every trick 0, as in real runs."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loopwright.core.errors import LoopwrightError
from loopwright.core.task import Task
from loopwright.execution.base import Executor
from loopwright.execution.files import remove, run_in_thread
from loopwright.execution.local.executor import LocalExecutor
from loopwright.execution.local.reaper import Reaper
from loopwright.execution.sandbox import Sandbox, SandboxInstance
from loopwright.rollouts.remote.verify import (
    PreparedTask,
    VerifierReport,
    combine_reports,
    prepare,
    solve,
    stage,
    verify,
)
from loopwright.rollouts.tasks.harbor.source import TaskDirectory, TaskLocator
from loopwright.rollouts.tasks.harbor.task import TaskStep
from loopwright.rollouts.tasks.harbor.tricks import TRICKS, Snapshot, Trick, TrickScene, snapshot

_OUTPUT_BYTES = 2**20
_Act = Callable[[PreparedTask, TaskStep, SandboxInstance], Awaitable[str]]
"""What happens in a workspace before its tests run; its result is a problem, or empty."""


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """The test results of a task for its initial state, for its solution, and for tricks in place of one."""

    directory: TaskDirectory
    initial: VerifierReport
    solved: VerifierReport | None
    """None if it has no solution."""
    tricks: Mapping[str, VerifierReport]
    """By the names in TRICKS; an `error` for those that do not apply to the task."""

    @property
    def fooled_by(self) -> list[str]:
        """The tricks that score more than the initial state."""
        least = _reward(self.initial) or 0.0
        return [name for name, report in self.tricks.items() if (_reward(report) or 0.0) > least]

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
            if (reward := _reward(report)) != expected:
                problems.append(f"{name} scores {reward:g}, not {expected:g}")
        tricks = (f"{TRICKS[name][1]} scores {_reward(self.tricks[name]):g}, not 0" for name in self.fooled_by)
        return [*problems, *tricks]


def _reward(report: VerifierReport) -> float | None:
    rewards = report.get("rewards")
    return None if rewards is None else float(rewards.get("reward", sum(rewards.values())))


async def check_tasks(directories: Sequence[TaskDirectory], sandbox: Sandbox, *, jobs: int) -> AsyncIterator[TaskCheck]:
    """Check tasks, `jobs` at a time, and yield each result when it is ready."""
    slots, reaper = asyncio.Semaphore(jobs), Reaper("tasks")
    reaper.start()
    executor = LocalExecutor(parallel=jobs, output_bytes=_OUTPUT_BYTES)

    async def check(number: int, directory: TaskDirectory) -> TaskCheck:
        async with slots:
            return await _Checker(directory, sandbox, executor, reaper, number).check()

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


class _Checker:
    """Checks one task, each time in a new workspace."""

    def __init__(
        self, directory: TaskDirectory, sandbox: Sandbox, executor: Executor, reaper: Reaper, number: int
    ) -> None:
        self._directory, self._sandbox, self._executor = directory, sandbox, executor
        self._root, self._marker = reaper.directory, f"{reaper.marker}.{number}"
        self._changes: dict[str, tuple[Snapshot, Snapshot]] = {}
        """The workspace before and after the solution, by the name of the step."""

    async def check(self) -> TaskCheck:
        task = self._directory.task
        initial = await self._verify(_do_nothing)
        has_solution = task is not None and task.solution(task.steps[0]) is not None
        solved = await self._verify(self._solve) if has_solution else None
        tricks = {name: await self._verify(partial(self._play, play)) for name, (play, _) in TRICKS.items()}
        return TaskCheck(self._directory, initial, solved, tricks)

    async def _verify(self, act: _Act) -> VerifierReport:
        """The test results after `act` in place of an agent."""
        workspace = Path(tempfile.mkdtemp(dir=self._root, prefix="workspace-"))
        task = Task(self._directory.id, (), extra={"local_task_path": str(self._directory.path)})
        try:
            prepared = await asyncio.to_thread(prepare, task, workspace, TaskLocator(self._root), self._sandbox)
            if prepared is None or not prepared.task.has_tests:
                return {"error": "it has no tests/test.sh"}
            async with self._sandbox.open(workspace, **prepared.sandbox_options) as instance:
                reports: list[VerifierReport] = []
                for step in prepared.task.steps:
                    await asyncio.to_thread(stage, prepared, step, workspace)
                    if problem := await act(prepared, step, instance):
                        return {"error": problem}
                    reports.append(
                        await verify(prepared, step, instance, self._executor, self._root, marker=self._marker)
                    )
                    if not step.allows_next(reports[-1]):
                        break
                return combine_reports(prepared, reports)
        except LoopwrightError as error:
            return {"error": str(error)}
        finally:
            await run_in_thread(remove, workspace)

    async def _solve(self, prepared: PreparedTask, step: TaskStep, instance: SandboxInstance) -> str:
        before = await asyncio.to_thread(snapshot, instance.workspace)
        problem = await solve(prepared, step, instance, self._executor, self._root, marker=self._marker)
        self._changes[step.name] = before, await asyncio.to_thread(snapshot, instance.workspace)
        return problem

    async def _play(self, play: Trick, prepared: PreparedTask, step: TaskStep, instance: SandboxInstance) -> str:
        before, after = self._changes.get(step.name, ({}, {}))
        tests_path = "/tests" if instance.has_own_paths else None
        scene = TrickScene(prepared.task, step, instance.workspace, before, after, tests_path)
        return "" if await asyncio.to_thread(play, scene) else "the trick does not apply"


async def _do_nothing(*_: object) -> str:
    return ""
