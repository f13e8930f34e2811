"""`loopwright convert`: other programs' files as a scenario."""

from pathlib import Path
from typing import Annotated

import tomli_w
import typer

from loopwright.cli.cloudai_files import HookDir, SingleSbatch, convert_files
from loopwright.reports.export import replacing
from loopwright.scenario.load import load

app = typer.Typer(help="Convert other programs' files into a scenario.", no_args_is_help=True)


@app.command("cloudai")
def cloudai(
    files: Annotated[list[Path], typer.Argument(metavar="SYSTEM TESTS_DIR SCENARIO", help="CloudAI's files.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The scenario to write.")],
    *,
    hook_dir: HookDir = None,
    single_sbatch: SingleSbatch = False,
) -> None:
    """Convert CloudAI's files into a scenario, which is checked before it is written."""
    conversion = convert_files(files, hook_dir, single_sbatch=single_sbatch)
    load(conversion.scenario)
    with replacing(output) as file:
        file.write(f"# Converted from CloudAI's {files[-1].name} by `loopwright convert cloudai`.\n")
        file.write(tomli_w.dumps(conversion.scenario))
    count = len(conversion.scenario["run"])
    typer.echo(f"{output}: {count} run{'s' * (count != 1)}; run it with `loopwright run {output} -o OUT`")
