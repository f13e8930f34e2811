"""A Harbor task around an agent: its files are copied before the agent starts, its tests run after it has ended."""

import asyncio
import math
import os
import re
import secrets
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
from loopwright.execution.files import remove, remove_in_background, run_in_thread
from loopwright.execution.local.process_tree import signal_name
from loopwright.execution.local.processes import MARKER_VARIABLE
from loopwright.execution.sandbox import Sandbox, SandboxError, SandboxInstance
from loopwright.execution.sandbox.links import UncheckedLinks, remove_outward_links
from loopwright.execution.sandbox.traps import find_traps
from loopwright.rollouts.tasks.harbor.dockerfile import WorkspaceLayout, read_layout
from loopwright.rollouts.tasks.harbor.reward import BrokenTests, read_rewards
from loopwright.rollouts.tasks.harbor.source import TaskLocator
from loopwright.rollouts.tasks.harbor.task import (
    IGNORED_NAMES,
    TEST,
    HarborTask,
    TaskChanged,
    TaskStep,
    directory_digest,
    resolve_env,
    walk_tree,
)
from loopwright.rollouts.tasks.sources import TasksError

VerifierReport = dict[str, Any]
"""The result of tests as plain data: `rewards` by name or an `error`, and `exit_code`, `seconds`, `output`."""
FORFEIT: Mapping[str, Any] = {"rewards": {"reward": 0.0}, "is_forfeit": True}
"""Of an agent that kept its tests from running: zero, whatever rewards the tests name."""
_SEARCH_PATHS = ("PATH", "LD_LIBRARY_PATH")
_INHERITED = (*_SEARCH_PATHS, "LANG", "LC_ALL", "TZ", MARKER_VARIABLE)
_TAIL_BYTES = 2000
_MAX_LINKS = 20
"""How many of the links that were removed a report names."""
_TESTS, _VERIFIER, _SOLUTION, _HOME = "/tests", "/logs/verifier", "/solution", "/logs/home"
_NAMED_PATHS = {_TESTS: rb"/tests", _VERIFIER: rb"/logs"}
_NAMED = rb"(?<!:-)(?<![\w.}])%s(?![\w-])"
"""How tests name a path of Harbor's, other than as the default of a variable (`${LOOPWRIGHT_TESTS_DIR:-/tests}`)."""
_MAX_SOURCE_BYTES = 2**20
_GIT_ENV = {
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "core.hooksPath",
    "GIT_CONFIG_VALUE_0": "/dev/null",
    "GIT_CONFIG_KEY_1": "core.fsmonitor",
    "GIT_CONFIG_VALUE_1": "false",
}
"""Keeps git from running programs that a repository in the workspace names: `git status` would run its fsmonitor."""
_PATH_VARIABLES = {
    _TESTS: "LOOPWRIGHT_TESTS_DIR",
    _VERIFIER: "LOOPWRIGHT_VERIFIER_DIR",
    _SOLUTION: "LOOPWRIGHT_SOLUTION_DIR",
}
"""Harbor's directories, and the variables with their paths for sandboxes that cannot mount them."""


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """A task whose workspace is ready."""

    task: HarborTask
    layout: WorkspaceLayout
    env: Mapping[str, str]
    """Variables of the task's environment, for the agent and the tests."""
    tests_env: Mapping[str, Mapping[str, str]]
    """Variables of the tests only, by the name of their step."""
    prepared_ns: int = field(compare=False)
    """When that was, by the clock of the workspace's file system."""

    @property
    def sandbox_options(self) -> dict[str, Any]:
        """How its sandbox is opened."""
        hide = (self.task.path.resolve(),)  # with its tests and its solution
        return {"mount_at": self.layout.workdir, "hide": hide, "image": self.layout.image}


def prepare(
    task: Task, workspace: Path, locator: TaskLocator, sandbox: Sandbox, *, run_tests: bool = True
) -> PreparedTask | None:
    """Copy the task's files, and those of its image, into the workspace; None for a task without a directory.

    TasksError if the directory is missing, or needs Docker or an unset variable (those of the tests only if they will
    run); TaskChanged if it was modified since the tasks were loaded.
    """
    harbor_task = locator.read(task)
    if harbor_task is None:
        return None
    layout = read_layout(harbor_task, sandbox.images)
    env = {**layout.env, **harbor_task.agent_env()}
    tests_env = {step.name: harbor_task.tests_env(step) for step in harbor_task.steps if run_tests}
    if sandbox.images is not None and layout.image is not None:
        sandbox.images.copy_out(layout.image, layout.workdir, workspace)
    layout.copy_into(workspace)
    _check_unchanged(harbor_task)
    workspace.touch()
    return PreparedTask(harbor_task, layout, env, tests_env, workspace.stat().st_ctime_ns)


def stage(prepared: PreparedTask, step: TaskStep, workspace: Path) -> None:
    """Add the files of a step to the workspace."""
    _open_up(workspace)
    files = prepared.task.files(step)
    for name, source, info in walk_tree(files, IGNORED_NAMES) if files is not None else ():
        target = workspace / name
        # The agent of an earlier step may have put a link here that leads out of its sandbox.
        if stat.S_ISDIR(info.st_mode):
            if target.is_symlink() or not target.is_dir():
                target.unlink(missing_ok=True)
                target.mkdir()
            continue
        if target.is_dir() and not target.is_symlink():
            remove(target)
        target.unlink(missing_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)


def _open_up(workspace: Path) -> None:
    """Let the next command start in a workspace that the agent may have made inaccessible."""
    workspace.chmod(stat.S_IMODE(workspace.stat().st_mode) | stat.S_IRWXU)


async def verify(
    prepared: PreparedTask,
    step: TaskStep,
    sandbox: SandboxInstance,
    executor: Executor,
    scratch: Path,
    *,
    marker: str = "",
    on_start: OnStart = lambda _: None,
    timeout_s: float = math.inf,
) -> VerifierReport:
    """Run a step's tests in the sandbox that the agent used. Raises only if the sandbox fails or the disk is full.

    The tests run from fresh copies below `scratch`, which no agent could see, at a path that none can guess, with a
    separate home directory. Programs and modules are searched only where no agent could have put any, and links that
    lead out of the workspace are removed. Broken tests, and those that take longer than `timeout_s`, give an `error`,
    unless the agent may have caused that by what it left: then the reward is zero.
    """
    directory = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=scratch, prefix="tests-"))
    try:
        try:
            await asyncio.to_thread(_copy_tests, prepared.task, step, directory)
        except TasksError as error:
            return {"error": str(error)}
        await asyncio.to_thread(sandbox.begin_verification)
        try:
            removed_links = await run_in_thread(remove_outward_links, sandbox)
        except UncheckedLinks as error:
            return {**FORFEIT, "output": str(error)}
        traps = await run_in_thread(partial(find_traps, sandbox), prepared.prepared_ns)
        await asyncio.to_thread(_open_up, sandbox.workspace)
        mounts = {mount: directory / Path(mount).name for mount in (_VERIFIER, _HOME)}
        env = {**_trusted_search_paths(sandbox), **prepared.env, **prepared.tests_env[step.name]}
        paths = await asyncio.to_thread(_choose_paths, directory / "tests")
        timeout_s = min(timeout_s, step.verifier_timeout_s)
        script = TaskScript(f"{_TESTS}/{TEST}", mounts, env, timeout_s, {_TESTS: directory / "tests"}, paths)
        completion = await executor.run(script.command(sandbox, directory, marker), on_start)
        if await asyncio.to_thread(sandbox.setup_failed, completion):
            reason = f"the sandbox for the tests failed: {_output_tail(directory)}"
            if await asyncio.to_thread(sandbox.is_ruined):
                return {**FORFEIT, "output": f"{reason} (because of what the agent left in it)"}
            raise SandboxError(reason)
        report = await asyncio.to_thread(_report, directory, completion, timeout_s, sandbox.exceeded_limit)
        # Or an agent could avoid a zero: remove the tests' shell, or leave a pipe for them to wait for.
        if "error" in report and await asyncio.to_thread(sandbox.has_changed_system):
            report = _forfeit(report, "the agent changed files in /usr or /etc")
        elif "error" in report and traps:
            report = _forfeit(report, f"the agent left {', '.join(traps)}")
        return {**report, "removed_links": removed_links[:_MAX_LINKS]} if removed_links else report
    finally:
        await remove_in_background(directory)


def _forfeit(report: VerifierReport, cause: str) -> VerifierReport:
    """The report of broken tests that may be broken because of the agent."""
    output = f"{report['output']}\n{report['error']}; {cause}".strip()
    details = {name: value for name, value in report.items() if name not in ("error", "stopped")}
    return {**details, **FORFEIT, "output": output}


@dataclass(frozen=True, slots=True)
class TaskScript:
    """A script of a task, and the directories that Harbor would mount for it."""

    path: str
    mounts: Mapping[str, Path]
    env: Mapping[str, str]
    timeout_s: float | None
    read_only: Mapping[str, Path] = field(default_factory=dict)
    """Further directories, which are mounted read-only."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Where Harbor's directories are mounted, if not at Harbor's paths."""

    def command(self, sandbox: SandboxInstance, outputs: Path, marker: str) -> Command:
        """The command that runs it in a sandbox. Variables hold the paths of its directories."""
        mounts = {**self.mounts, **self.read_only}
        paths = {mount: self.paths.get(mount, mount) for mount in mounts}
        if not sandbox.has_own_paths:
            paths = {mount: str(path) for mount, path in mounts.items()}
        parent, _, name = self.path.rpartition("/")
        env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        env |= {} if sandbox.has_own_paths else {"HOME": str(outputs), "TMPDIR": str(outputs)}
        env |= {"HOME": paths[_HOME]} if _HOME in paths else {}
        # The tests must import neither what an agent left in its home directory nor what is in the workspace, but their
        # own modules.
        env |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": paths[_TESTS]} if _TESTS in paths else {}
        env |= {"PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1", **_GIT_ENV, **self.env}
        env |= {_PATH_VARIABLES[mount]: path for mount, path in paths.items() if mount in _PATH_VARIABLES}
        command = Command(
            # By a shell, like Harbor: it also runs scripts without a shebang line.
            argv=("bash", "-c", '"$0"', f"{paths[parent]}/{name}"),
            directory=sandbox.workspace,
            environment=env,
            stdout=outputs / "stdout",
            stderr=outputs / "stderr",
            timeout_s=self.timeout_s,
            marker=marker,
        )
        writable = {paths[mount]: path for mount, path in self.mounts.items()}
        return sandbox.wrap(command, writable, {paths[mount]: path for mount, path in self.read_only.items()})


def _choose_paths(tests: Path) -> dict[str, str]:
    """Where the directories of tests are mounted: at a path that no agent can guess, or at Harbor's if they name it."""
    room = f"/{secrets.token_hex(16)}"
    paths = {mount: f"{room}/{Path(mount).name}" for mount in (_TESTS, _VERIFIER, _HOME)}
    for _, file, info in walk_tree(tests):
        if stat.S_ISREG(info.st_mode):
            with file.open("rb") as source:
                text = source.read(_MAX_SOURCE_BYTES)
            paths |= {mount: mount for mount, path in _NAMED_PATHS.items() if re.search(_NAMED % path, text)}
    return paths


def _trusted_search_paths(sandbox: SandboxInstance) -> dict[str, str]:
    """Search paths for tests, without directories in which the agent could have put programs."""
    paths = {}
    for name in _SEARCH_PATHS:
        parts = map(os.path.normpath, os.environ.get(name, "").split(os.pathsep))
        paths[name] = os.pathsep.join(part for part in parts if part[0] == "/" and sandbox.is_trusted(Path(part)))
    return {"PATH": paths["PATH"] or os.defpath, "LD_LIBRARY_PATH": paths["LD_LIBRARY_PATH"]}


async def solve(
    prepared: PreparedTask,
    step: TaskStep,
    sandbox: SandboxInstance,
    executor: Executor,
    scratch: Path,
    *,
    marker: str = "",
) -> str:
    """Run a step's solution instead of an agent; the error message, or nothing."""
    solution = prepared.task.solution(step)
    if solution is None:
        return "it has no solution/solve.sh"
    directory = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=scratch, prefix="solution-"))
    try:
        await asyncio.to_thread(_copy, [solution], directory / "solution", "solve.sh")
        env = {
            **prepared.env,
            **resolve_env(prepared.task.solution_env, f"{prepared.task.path / 'task.toml'}, solution.env"),
        }
        script = TaskScript(f"{_SOLUTION}/solve.sh", {_SOLUTION: directory / "solution"}, env, step.agent_timeout_s)
        completion = await executor.run(script.command(sandbox, directory, marker), lambda _: None)
        if completion.exit_code == 0 and not completion.timed_out:
            return ""
        failure = f"exited with {completion.exit_code}"
        if completion.timed_out:
            failure = f"was stopped after {step.agent_timeout_s:g} s"
        elif completion.signal is not None:
            failure = f"was killed by {signal_name(completion.signal)}"
        return f"solve.sh {failure}: {_output_tail(directory)}"
    finally:
        await remove_in_background(directory)


def combine_reports(prepared: PreparedTask, reports: Sequence[VerifierReport]) -> VerifierReport:
    """One report for all steps, by Harbor's rules: the mean over the steps that were started, or the last one's."""
    if len(prepared.task.steps) == 1:
        return reports[0]
    steps = {step.name: report for step, report in zip(prepared.task.steps, reports, strict=False)}
    if broken := {name: report for name, report in steps.items() if "error" in report}:
        name, first = next(iter(broken.items()))
        stopped = {"stopped": True} if all(report.get("stopped") for report in broken.values()) else {}
        return {"error": f"step {name}: {first['error']}", "steps": steps, **stopped}
    if all(report.get("is_forfeit") for report in reports) or (
        prepared.task.strategy == "final" and reports[-1].get("is_forfeit")
    ):
        return {**FORFEIT, "steps": steps}
    if prepared.task.strategy == "final":
        return {"rewards": reports[-1]["rewards"], "steps": steps}
    names = dict.fromkeys(name for report in reports for name in report["rewards"])
    rewards = {name: math.fsum(report["rewards"].get(name, 0.0) for report in reports) / len(reports) for name in names}
    return {"rewards": rewards, "steps": steps}


def _check_unchanged(task: HarborTask) -> None:
    """TaskChanged if the task's files were modified, even while they were copied."""
    if directory_digest(task.path) != task.digest:
        raise TaskChanged(f"{task.path} has changed during a rollout; restore it, or start a new run")


def _copy_tests(task: HarborTask, step: TaskStep, directory: Path) -> None:
    sources = task.test_directories(step)
    if not sources:
        raise TasksError(f"{task.path} has no tests/{TEST}")
    _copy(sources, directory / "tests", TEST)
    for mount in (_VERIFIER, _HOME):
        (directory / Path(mount).name).mkdir()
    _check_unchanged(task)


def _copy(sources: Sequence[Path], target: Path, script: str) -> None:
    for source in sources:
        ignore = shutil.ignore_patterns(*IGNORED_NAMES)
        shutil.copytree(source, target, symlinks=True, ignore=ignore, dirs_exist_ok=True)
    (target / script).chmod(0o755)


def _report(directory: Path, completion: Completion, timeout_s: float, exceeded_limit: str | None) -> VerifierReport:
    code = completion.exit_code
    details = {"exit_code": code, "seconds": round(completion.usage["wall_s"], 3), "output": _output_tail(directory)}
    if completion.timed_out or exceeded_limit is not None:
        reason = f"after {timeout_s:g} s" if exceeded_limit is None else f"at a limit: {exceeded_limit}"
        return {"error": f"{TEST} was stopped {reason}", **details, "stopped": True}
    try:
        # Whatever the exit code: tests often end in a crash of the agent's program, which must count as zero.
        return {"rewards": read_rewards(directory / "verifier"), **details}
    except BrokenTests as error:
        # A shell reports the signal that killed its last command as an exit code.
        signal = code - 128 if code is not None and 128 < code <= 192 else completion.signal
        if signal is None:
            return {"error": f"{TEST} {error}", **details}
        return {"error": f"{TEST} was killed by {signal_name(signal)} and {error}", **details, "stopped": True}


def _output_tail(directory: Path) -> str:
    """The end of what a script printed."""
    return "".join(read_tail(directory / name, _TAIL_BYTES // 2) for name in ("stdout", "stderr")).strip()


def read_tail(path: Path, max_bytes: int) -> str:
    """The end of a text file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
