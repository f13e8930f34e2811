"""A Harbor task's tests: its files are laid out before the agent comes, its tests are run once it is gone."""

import asyncio
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from loopwright.core.task import Task
from loopwright.execution.base import Command, Completion, Executor, OnStart
from loopwright.execution.local.process_tree import signal_name
from loopwright.execution.local.processes import MARKER_VARIABLE
from loopwright.execution.sandbox import SandboxError, SandboxInstance
from loopwright.execution.sandbox.files import remove, remove_in_background
from loopwright.rollouts.tasks.base import TasksError
from loopwright.rollouts.tasks.harbor.dockerfile import WorkspaceLayout, read_layout
from loopwright.rollouts.tasks.harbor.reward import NoVerdict, rewards_in
from loopwright.rollouts.tasks.harbor.source import TaskLocator
from loopwright.rollouts.tasks.harbor.task import (
    PASSED_OVER,
    TEST,
    HarborTask,
    TaskChanged,
    TaskStep,
    digest_of,
    resolved,
    tree,
)

VerifierReport = dict[str, Any]
"""What tests said, as plain data: `rewards` by name or an `error`, and `exit_code`, `seconds`, `output`."""
_SEARCHED = ("PATH", "LD_LIBRARY_PATH")
_KEPT = (*_SEARCHED, "LANG", "LC_ALL", "TZ", MARKER_VARIABLE)
_TAIL_BYTES = 2000
_TESTS, _VERIFIER, _SOLUTION, _HOME = "/tests", "/logs/verifier", "/solution", "/logs/home"
_VARIABLES = {
    _TESTS: "LOOPWRIGHT_TESTS_DIR",
    _VERIFIER: "LOOPWRIGHT_VERIFIER_DIR",
    _SOLUTION: "LOOPWRIGHT_SOLUTION_DIR",
}
"""Harbor's places, and the variables that say where they are where nothing can be mounted."""


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """A task whose workspace is ready."""

    task: HarborTask
    layout: WorkspaceLayout
    env: Mapping[str, str]
    """The variables of the task's environment, for the agent and the tests."""
    tests_env: Mapping[str, Mapping[str, str]]
    """The variables of the tests alone, by the name of their step."""

    @property
    def steps(self) -> tuple[TaskStep, ...]:
        """What the agent is asked to do, one after the other."""
        return self.task.steps

    @property
    def tested(self) -> bool:
        """Whether there are tests to run."""
        return self.task.tested

    @property
    def workdir(self) -> str:
        """What the workspace is called inside, where a sandbox has paths of its own."""
        return self.layout.workdir

    @property
    def hide(self) -> tuple[Path, ...]:
        """What the agent must not see: tests and solution."""
        return (self.task.path.resolve(),)


def prepare(task: Task, workspace: Path, places: TaskLocator, *, verifies: bool = True) -> PreparedTask | None:
    """Put the task's files into the workspace; None for a task without a directory.

    TasksError if it has none where it should be, needs Docker or a variable that is not set (those of the tests
    only if one `verifies`), TaskChanged if it is not what it was.
    """
    found = places.read(task)
    if found is None:
        return None
    layout = read_layout(found)
    env = {**layout.env, **found.agent_env()}
    tests_env = {step.name: found.tests_env(step) for step in found.steps if verifies}
    layout.copy_into(workspace)
    _unchanged(found)
    return PreparedTask(found, layout, env, tests_env)


def stage(prepared: PreparedTask, step: TaskStep, workspace: Path) -> None:
    """Add a step's own files to the workspace."""
    files = prepared.task.files(step)
    for name, source, found in tree(files, PASSED_OVER) if files is not None else ():
        target = workspace / name
        # The agent of an earlier step may have put a link here that leads out of its sandbox.
        if stat.S_ISDIR(found.st_mode):
            if target.is_symlink() or not target.is_dir():
                target.unlink(missing_ok=True)
                target.mkdir()
            continue
        if target.is_dir() and not target.is_symlink():
            remove(target)
        target.unlink(missing_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)


async def verify(
    prepared: PreparedTask,
    step: TaskStep,
    sandbox: SandboxInstance,
    executor: Executor,
    scratch: Path,
    *,
    marker: str = "",
    started: OnStart = lambda _pid, _ticks: None,
) -> VerifierReport:
    """Run a step's tests in the sandbox that the agent used. Raises only if the sandbox fails or the disk is full.

    They see copies, made now, below `scratch`, which no agent ever saw, and have a home of their own; programs are
    looked for where no agent could put any. Tests that are broken are an `error`.
    """
    directory = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=scratch, prefix="tests-"))
    try:
        try:
            await asyncio.to_thread(_copy_tests, prepared.task, step, directory)
        except TasksError as error:
            return {"error": str(error)}
        mounts = {place: directory / Path(place).name for place in (_VERIFIER, _HOME)}
        env = {**_clean(sandbox), **prepared.env, **prepared.tests_env[step.name]}
        script = Script(f"{_TESTS}/{TEST}", mounts, env, step.verifier_timeout_s, {_TESTS: directory / "tests"})
        await asyncio.to_thread(sandbox.begin_verification)
        completion = await executor.run(script.command(sandbox, directory, marker), started)
        if sandbox.setup_failed(completion):
            raise SandboxError(f"the sandbox for the tests could not be set up: {_tail(directory)}")
        return await asyncio.to_thread(_said, directory, completion, step.verifier_timeout_s, sandbox.exceeded_limit)
    finally:
        await remove_in_background(directory)


@dataclass(frozen=True, slots=True)
class Script:
    """A script of a task, and the directories that Harbor would give it."""

    path: str
    mounts: Mapping[str, Path]
    env: Mapping[str, str]
    timeout_s: float | None
    fixed: Mapping[str, Path] = field(default_factory=dict)
    """Those of the directories that nothing is to change."""

    def command(self, sandbox: SandboxInstance, outputs: Path, marker: str) -> Command:
        """The command that runs it in a sandbox. Where nothing can be mounted, variables say where things are."""
        at = {p: p if sandbox.has_own_paths else str(path) for p, path in {**self.mounts, **self.fixed}.items()}
        place, _, name = self.path.rpartition("/")
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        own = {} if sandbox.has_own_paths else {"HOME": str(outputs), "TMPDIR": str(outputs)}
        own |= {"HOME": at[_HOME]} if _HOME in at else {}
        # What an agent left in its home must not be imported by the tests.
        own |= {"PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        variables = {_VARIABLES[place]: path for place, path in at.items() if place in _VARIABLES}
        command = Command(
            # As Harbor does it, by a shell: a script without a first line that says what runs it is the shell's own.
            argv=("bash", "-c", '"$0"', f"{at[place]}/{name}"),
            directory=sandbox.workspace,
            environment={**kept, **own, **self.env, **variables},
            stdout=outputs / "stdout",
            stderr=outputs / "stderr",
            timeout_s=self.timeout_s,
            marker=marker,
        )
        return sandbox.wrap(command, self.mounts, self.fixed)


def _clean(sandbox: SandboxInstance) -> dict[str, str]:
    """Where tests look for programs: nowhere that the agent could have put one of its own."""
    kept = {}
    for name in _SEARCHED:
        parts = map(os.path.normpath, os.environ.get(name, "").split(os.pathsep))
        kept[name] = os.pathsep.join(part for part in parts if part[0] == "/" and sandbox.is_trusted(Path(part)))
    return {"PATH": kept["PATH"] or os.defpath, "LD_LIBRARY_PATH": kept["LD_LIBRARY_PATH"]}


async def solve(
    prepared: PreparedTask,
    step: TaskStep,
    sandbox: SandboxInstance,
    executor: Executor,
    scratch: Path,
    *,
    marker: str = "",
) -> str:
    """Run a step's own solution in place of an agent; what went wrong, or nothing."""
    solution = prepared.task.solution(step)
    if solution is None:
        return "it has no solution/solve.sh"
    directory = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=scratch, prefix="solution-"))
    try:
        await asyncio.to_thread(_copy, [solution], directory / "solution", "solve.sh")
        env = {
            **prepared.env,
            **resolved(prepared.task.solution_env, f"{prepared.task.path / 'task.toml'}, solution.env"),
        }
        script = Script(f"{_SOLUTION}/solve.sh", {_SOLUTION: directory / "solution"}, env, step.agent_timeout_s)
        completion = await executor.run(script.command(sandbox, directory, marker), lambda _pid, _ticks: None)
        if completion.exit_code == 0 and not completion.timed_out:
            return ""
        how = f"ended with code {completion.exit_code}"
        if completion.timed_out:
            how = f"was ended after {step.agent_timeout_s:g} s"
        elif completion.signal is not None:
            how = f"was ended by {signal_name(completion.signal)}"
        return f"solve.sh {how}: {_tail(directory)}"
    finally:
        await remove_in_background(directory)


def combine_reports(prepared: PreparedTask, said: Sequence[VerifierReport]) -> VerifierReport:
    """What the tests of all steps said together, as Harbor has it: the mean over steps begun, or the last one's."""
    if len(prepared.steps) == 1:
        return said[0]
    steps = {step.name: one for step, one in zip(prepared.steps, said, strict=False)}
    if broken := {name: one for name, one in steps.items() if "error" in one}:
        name, first = next(iter(broken.items()))
        stopped = {"stopped": True} if all(one.get("stopped") for one in broken.values()) else {}
        return {"error": f"step {name}: {first['error']}", "steps": steps, **stopped}
    if prepared.task.strategy == "final":
        return {"rewards": said[-1]["rewards"], "steps": steps}
    names = dict.fromkeys(name for one in said for name in one["rewards"])
    rewards = {name: math.fsum(one["rewards"].get(name, 0.0) for one in said) / len(said) for name in names}
    return {"rewards": rewards, "steps": steps}


def _unchanged(task: HarborTask) -> None:
    """Also while it was copied."""
    if digest_of(task.path) != task.digest:
        raise TaskChanged(f"{task.path} has changed during a rollout; restore it, or start a run of its own")


def _copy_tests(task: HarborTask, step: TaskStep, directory: Path) -> None:
    sources = task.test_directories(step)
    if not sources:
        raise TasksError(f"{task.path} has no tests/{TEST}")
    _copy(sources, directory / "tests", TEST)
    for place in (_VERIFIER, _HOME):
        (directory / Path(place).name).mkdir()
    _unchanged(task)


def _copy(sources: Sequence[Path], target: Path, script: str) -> None:
    for source in sources:
        over = shutil.ignore_patterns(*PASSED_OVER)
        shutil.copytree(source, target, symlinks=True, ignore=over, dirs_exist_ok=True)
    (target / script).chmod(0o755)


def _said(directory: Path, completion: Completion, timeout_s: float, exceeded: str | None) -> VerifierReport:
    said: VerifierReport = {
        "exit_code": completion.exit_code,
        "seconds": round(completion.usage.wall_s, 3),
        "output": _tail(directory),
    }
    if completion.timed_out or exceeded is not None:
        how = f"after {timeout_s:g} s" if exceeded is None else f"for it broke a bound: {exceeded}"
        return {"error": f"{TEST} was ended {how}", **said, "stopped": True}
    try:
        # However it ended: a crash of the agent's own program, on which many tests end, must not lose it a zero.
        return {"rewards": rewards_in(directory / "verifier"), **said}
    except NoVerdict as error:
        if (signal := _signal(completion)) is None:
            return {"error": f"{TEST} {error}", **said}
        return {"error": f"{TEST} was ended by {signal_name(signal)} and {error}", **said, "stopped": True}


def _signal(completion: Completion) -> int | None:
    """The signal that it ended by, or that a shell says its last command ended by."""
    code = completion.exit_code
    return code - 128 if code is not None and 128 < code <= 192 else completion.signal


def _tail(directory: Path) -> str:
    """The end of what a script printed."""
    return "".join(map(partial(_end_of, _TAIL_BYTES // 2), (directory / "stdout", directory / "stderr"))).strip()


def _end_of(most: int, file: Path) -> str:
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - most))
            return opened.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
