"""Harbor task directories for tests."""

import os
from pathlib import Path

from loopwright.core.task import Task
from loopwright.execution import Command, LocalExecutor
from loopwright.execution.sandbox import NoSandbox
from loopwright.rollouts.remote.verify import combine_reports, prepare, stage, verify
from loopwright.rollouts.tasks.harbor.source import TaskLocator

TOML = """
[metadata]
difficulty = "easy"
"""
PASS = 'echo 1 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"'


def write(root: Path, *, toml: str = TOML, instruction: str = "Do it.", test: str | None = PASS, **files: str) -> Path:
    """A task directory; `files` are its other files, with `__` for a slash."""
    texts = {"task.toml": toml, "instruction.md": instruction, **{n.replace("__", "/"): t for n, t in files.items()}}
    if test is not None:
        texts["tests/test.sh"] = f"#!/bin/bash\n{test}\n"
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def task_at(path: Path, **extra: object) -> Task:
    return Task("t", ({"role": "user", "content": "Do it."},), extra={"local_task_path": str(path), **extra})


def _script(text: str, directory: Path) -> Command:
    outputs = {name: directory / f"agent.{name}" for name in ("stdout", "stderr")}
    environment = {"PATH": "/usr/bin:/bin"}
    return Command(
        ("/bin/sh", "-c", text),
        directory / "workspace",
        environment,
        **outputs,
        timeout_s=20.0,
        marker=f"agent-{os.getpid()}",
    )


async def run_verifier(path: Path, directory: Path, work=lambda workspace: None, sandbox=None, agent: str = ""):
    """The report of the task's tests after `work` changed the workspace and this script ran in its sandbox."""
    (directory / "workspace").mkdir()
    prepared = prepare(task_at(path), directory / "workspace", TaskLocator(directory), sandbox or NoSandbox())
    executor, reports = LocalExecutor(), []
    try:
        async with (sandbox or NoSandbox()).open(directory / "workspace", **prepared.sandbox_options) as instance:
            for step in prepared.task.steps:
                stage(prepared, step, directory / "workspace")
                work(directory / "workspace")
                if agent:
                    await executor.run(instance.wrap(_script(agent, directory)), lambda _: None)
                reports.append(
                    await verify(prepared, step, instance, executor, directory, marker=f"verify-{os.getpid()}")
                )
                if not step.allows_next(reports[-1]):
                    break
    finally:
        await executor.close()
    return combine_reports(prepared, reports)
