"""`loopwright verify`: find every problem of scenarios without running them."""

from pathlib import Path
from typing import Annotated

import typer

from loopwright.cli.options import Overrides, overrides_of

NAME = "verify"


def command(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Scenarios, or directories of them.")],
    *,
    overrides: Overrides = None,
) -> None:
    """Check scenarios: every problem is listed, with file, key and what to do."""
    from loopwright.core.errors import ScenarioError
    from loopwright.scenario.load import load

    broken = 0
    files = [file for path in paths for file in (_scenarios(path) if path.is_dir() else [path])]
    for file in files:
        try:
            loaded = load(file, set=overrides_of(overrides))
        except ScenarioError as error:
            broken += 1
            typer.echo(f"{error}", err=True)
        else:
            runs = ", ".join(run.name for run in loaded.scenario.run)
            typer.echo(f"{file}: good ({runs})")
    if not files:
        typer.echo(f"there is no .toml file in {', '.join(map(str, paths))}", err=True)
    raise typer.Exit(2 if broken or not files else 0)


def _scenarios(directory: Path) -> list[Path]:
    """The scenarios below a directory; a task's `task.toml` is none, and `loopwright tasks scan` checks it."""
    found = sorted(directory.rglob("*.toml"))
    return [file for file in found if not (file.name == "task.toml" and (file.parent / "instruction.md").exists())]
