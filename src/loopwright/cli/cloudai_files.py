"""`--cloudai`: the verbs that load a scenario also take CloudAI's files."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from loopwright.cli.overrides import overrides_of
from loopwright.cloudai import Conversion, convert
from loopwright.core.errors import ScenarioError
from loopwright.scenario.kinds.base import LoadedScenario
from loopwright.scenario.load import load

Files = Annotated[
    list[Path],
    typer.Argument(metavar="SCENARIO", help="A scenario, one TOML file; with --cloudai SYSTEM TESTS_DIR SCENARIO."),
]
CloudAi = Annotated[bool, typer.Option("--cloudai", help="Read CloudAI's files: SYSTEM.toml TESTS_DIR SCENARIO.toml.")]
HookDir = Annotated[
    Path | None,
    typer.Option("--hook-dir", metavar="DIR", help="With --cloudai: the directory of hooks; by default conf/hook."),
]
SingleSbatch = Annotated[
    bool, typer.Option("--single-sbatch", help="With --cloudai: run all tests inside one Slurm job.")
]


def load_files(
    files: Sequence[Path], overrides: list[str] | None, *, cloudai: bool, hook_dir: Path | None, single_sbatch: bool
) -> tuple[LoadedScenario, Path | None]:
    """The scenario that the arguments of a verb name, and where CloudAI would put its results."""
    if not cloudai:
        if hook_dir is not None or single_sbatch:
            raise typer.BadParameter("goes with --cloudai.", param_hint="--hook-dir, --single-sbatch")
        if len(files) != 1:
            text = f"one scenario, not {len(files)} files; CloudAI's files go with --cloudai."
            raise typer.BadParameter(text, param_hint="SCENARIO")
        return load(files[0], set=overrides_of(overrides)), None
    conversion = convert_files(files, hook_dir, single_sbatch=single_sbatch)
    try:
        loaded = load(conversion.scenario, set=overrides_of(overrides))
    except ScenarioError as error:
        raise ScenarioError(files[-1], error.problems) from error
    return replace(loaded, label=str(files[-1].absolute())), conversion.output


def convert_files(files: Sequence[Path], hook_dir: Path | None, *, single_sbatch: bool) -> Conversion:
    """Convert SYSTEM [TESTS_DIR] SCENARIO, and print what differs from CloudAI."""
    if not 2 <= len(files) <= 3:
        raise typer.BadParameter("give SYSTEM.toml TESTS_DIR SCENARIO.toml.", param_hint="--cloudai")
    tests = files[1] if len(files) == 3 else None
    if tests is not None and not tests.is_dir():
        raise typer.BadParameter(f"{tests} is not a directory of tests.", param_hint="--cloudai")
    conversion = convert(files[0], tests, files[-1], hooks=hook_dir, single_sbatch=single_sbatch)
    for note in dict.fromkeys(conversion.notes):
        typer.echo(f"{files[-1]}, note: {note}", err=True)
    return conversion
