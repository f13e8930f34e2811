"""A Harbor task's tests: its files are laid out before the agent comes, its tests are run once it is gone."""

import asyncio
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from loopwright.core.task import Task
from loopwright.execution import Command, Completion, Executor
from loopwright.execution.base import Started
from loopwright.execution.processes import VARIABLE
from loopwright.execution.sandbox import Room, SandboxError
from loopwright.execution.tree import signal_name
from loopwright.rollouts.dockerfile import Layout, layout_of
from loopwright.rollouts.harbor import Places
from loopwright.rollouts.harbor_reward import NoVerdict, rewards_in
from loopwright.rollouts.harbor_task import TEST, HarborTask, Step, TaskChanged, digest_of, resolved, tree
from loopwright.rollouts.judging.scratch import remove
from loopwright.rollouts.tasks import TasksError

Said = dict[str, Any]
"""What tests said, as plain data: `rewards` by name or an `error`, and `exit_code`, `seconds`, `output`."""
_KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", VARIABLE)
_TAIL_BYTES = 2000
_TESTS, _VERIFIER, _SOLUTION = "/tests", "/logs/verifier", "/solution"
_VARIABLES = {
    _TESTS: "LOOPWRIGHT_TESTS_DIR",
    _VERIFIER: "LOOPWRIGHT_VERIFIER_DIR",
    _SOLUTION: "LOOPWRIGHT_SOLUTION_DIR",
}
"""Harbor's places, and the variables that say where they are where nothing can be mounted."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task whose workspace is ready."""

    task: HarborTask
    layout: Layout
    env: Mapping[str, str]
    """The variables of the task's environment, for the agent and the tests."""

    @property
    def steps(self) -> tuple[Step, ...]:
        """What the agent is asked to do, one after the other."""
        return self.task.steps

    @property
    def tested(self) -> bool:
        """Whether there are tests to run."""
        return self.task.tested

    @property
    def workdir(self) -> str:
        """What the workspace is called inside, where a room has paths of its own."""
        return self.layout.workdir

    @property
    def hide(self) -> tuple[Path, ...]:
        """What the agent must not see: tests and solution."""
        return (self.task.path.resolve(),)


def prepare(task: Task, workspace: Path, places: Places) -> Prepared | None:
    """Put the task's files into the workspace; None for a task without a directory.

    TasksError if it has none where it should be or needs Docker, TaskChanged if it is not what it was.
    """
    found = places.read(task)
    if found is None:
        return None
    layout = layout_of(found)
    env = {**layout.env, **resolved(found.env, f"{found.path / 'task.toml'}, environment.env")}
    layout.lay_out(workspace)
    _unchanged(found)
    return Prepared(found, layout, env)


def stage(prepared: Prepared, step: Step, workspace: Path) -> None:
    """Add a step's own files to the workspace."""
    files = prepared.task.files(step)
    for name, source, found in tree(files) if files is not None else ():
        target = workspace / name
        # The agent of an earlier step may have put a link here that leads out of its room.
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
    prepared: Prepared,
    step: Step,
    room: Room,
    executor: Executor,
    scratch: Path,
    *,
    marker: str = "",
    started: Started = lambda _pid, _ticks: None,
) -> Said:
    """Run a step's tests in the room that the agent has left; only a room that cannot be had, or a full disk, raises.

    They see copies, made now, below `scratch`, which no agent ever saw. Tests that are broken are an `error`.
    """
    directory = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=scratch, prefix="tests-"))
    try:
        try:
            await asyncio.to_thread(_copy_tests, prepared.task, step, directory)
            env = {**prepared.env, **resolved(step.verifier_env, f"{prepared.task.path / 'task.toml'}, verifier.env")}
        except TasksError as error:
            return {"error": str(error)}
        mounts = {_TESTS: directory / "tests", _VERIFIER: directory / "verifier"}
        script = Script(f"{_TESTS}/{TEST}", mounts, env, step.verifier_timeout_s)
        before = room.exceeded
        completion = await executor.run(script.command(room, directory, marker), started)
        if room.failed(completion):
            raise SandboxError(f"the room for the tests could not be set up: {_tail(directory)}")
        exceeded = None if before else room.exceeded
        return await asyncio.to_thread(_said, directory, completion, step.verifier_timeout_s, exceeded)
    finally:
        await asyncio.to_thread(remove, directory)


@dataclass(frozen=True, slots=True)
class Script:
    """A script of a task, and the directories that Harbor would give it."""

    path: str
    mounts: Mapping[str, Path]
    env: Mapping[str, str]
    timeout_s: float | None

    def command(self, room: Room, outputs: Path, marker: str) -> Command:
        """The command that runs it in a room. Where nothing can be mounted, variables say where things are."""
        at = {place: place if room.mounts else str(path) for place, path in self.mounts.items()}
        place, _, name = self.path.rpartition("/")
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        own = {} if room.mounts else {"HOME": str(outputs), "TMPDIR": str(outputs)}
        # What an agent left in its home must not be imported by the tests.
        own |= {"PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        variables = {_VARIABLES[place]: path for place, path in at.items()}
        command = Command(
            # As Harbor does it, by a shell: a script without a first line that says what runs it is the shell's own.
            argv=("bash", "-c", '"$0"', f"{at[place]}/{name}"),
            directory=room.workspace,
            environment={**kept, **own, **self.env, **variables},
            stdout=outputs / "stdout",
            stderr=outputs / "stderr",
            timeout_s=self.timeout_s,
            marker=marker,
        )
        return room.command(command, self.mounts)


async def solve(
    prepared: Prepared, step: Step, room: Room, executor: Executor, scratch: Path, *, marker: str = ""
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
        completion = await executor.run(script.command(room, directory, marker), lambda _pid, _ticks: None)
        try:
            _ended(completion, step.agent_timeout_s)
        except NoVerdict as error:
            return f"solve.sh {error}: {_tail(directory)}"
        return (
            "" if completion.exit_code == 0 else f"solve.sh ended with code {completion.exit_code}: {_tail(directory)}"
        )
    finally:
        await asyncio.to_thread(remove, directory)


def combined(prepared: Prepared, said: Sequence[Said]) -> Said:
    """What the tests of all steps said together, as Harbor has it: the mean over steps begun, or the last one's."""
    if len(prepared.steps) == 1:
        return said[0]
    steps = {step.name: one for step, one in zip(prepared.steps, said, strict=False)}
    if broken := [f"step {name}: {one['error']}" for name, one in steps.items() if "error" in one]:
        return {"error": broken[0], "steps": steps}
    if prepared.task.strategy == "final":
        return {"rewards": said[-1]["rewards"], "steps": steps}
    names = dict.fromkeys(name for one in said for name in one["rewards"])
    rewards = {name: math.fsum(one["rewards"].get(name, 0.0) for one in said) / len(said) for name in names}
    return {"rewards": rewards, "steps": steps}


def _unchanged(task: HarborTask) -> None:
    """Also while it was copied."""
    if digest_of(task.path) != task.digest:
        raise TaskChanged(f"{task.path} has changed during a rollout; restore it, or start a run of its own")


def _copy_tests(task: HarborTask, step: Step, directory: Path) -> None:
    sources = task.test_directories(step)
    if not sources:
        raise TasksError(f"{task.path} has no tests/{TEST}")
    _copy(sources, directory / "tests", TEST)
    (directory / "verifier").mkdir()
    _unchanged(task)


def _copy(sources: Sequence[Path], target: Path, script: str) -> None:
    for source in sources:
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    (target / script).chmod(0o755)


def _said(directory: Path, completion: Completion, timeout_s: float, exceeded: str | None) -> Said:
    said: Said = {
        "exit_code": completion.exit_code,
        "seconds": round(completion.usage.wall_s, 3),
        "output": _tail(directory),
    }
    try:
        if exceeded is not None:
            raise NoVerdict(f"was ended: {exceeded}")
        _ended(completion, timeout_s)
        return {"rewards": rewards_in(directory / "verifier"), **said}
    except NoVerdict as error:
        stopped = completion.timed_out or completion.signal is not None or exceeded is not None
        return {"error": f"{TEST} {error}", **said, **({"stopped": True} if stopped else {})}


def _ended(completion: Completion, timeout_s: float | None) -> None:
    if completion.timed_out:
        raise NoVerdict(f"was ended after {timeout_s:g} s")
    if completion.signal is not None:
        raise NoVerdict(f"was ended by {signal_name(completion.signal)}")


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
