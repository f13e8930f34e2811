"""`loopwright verify`: find every problem of scenarios without running them."""

from pathlib import Path
from typing import Annotated

import typer

from loopwright.cli.cloudai_files import CloudAi, HookDir, SingleSbatch, load_files
from loopwright.cli.overrides import Overrides
from loopwright.core.errors import ScenarioError


def command(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", help="Scenarios, or directories of them.")],
    *,
    overrides: Overrides = None,
    cloudai: CloudAi = False,
    hook_dir: HookDir = None,
    single_sbatch: SingleSbatch = False,
) -> None:
    """Check scenarios without running them. Lists every problem with its file, key and fix.

    Servers and Ray clusters that are named by address must be reachable, and clusters large enough. With --cloudai:
    SYSTEM TESTS_DIR SCENARIO...
    """
    shared, failed = paths[: min(2, len(paths) - 1)] if cloudai else [], False
    files: list[Path] = []
    for path in paths[len(shared) :]:
        # A task.toml beside an instruction.md is a task; `loopwright tasks scan` checks it.
        files += [
            file
            for file in (sorted(path.rglob("*.toml")) if path.is_dir() else [path])
            if path == file or not (file.name == "task.toml" and (file.parent / "instruction.md").exists())
        ]
    for file in files:
        try:
            loaded, _ = load_files(
                [*shared, file], overrides, cloudai=cloudai, hook_dir=hook_dir, single_sbatch=single_sbatch
            )
            if problems := [problem for run in loaded.runs for problem in run.unreachable(loaded.scenario.system)]:
                raise ScenarioError(file, problems)
        except ScenarioError as error:
            failed = True
            typer.echo(f"{error}", err=True)
        else:
            typer.echo(f"{file}: good ({', '.join(run.name for run in loaded.runs)})")
            for _, hint in loaded.hints:
                typer.echo(f"  hint: {hint.key}: {hint.message}")
    if not files:
        typer.echo(f"no .toml file found in {', '.join(map(str, paths))}", err=True)
    raise typer.Exit(2 if failed or not files else 0)
