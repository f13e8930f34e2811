"""`loopwright tasks`: what is in directories of Harbor tasks, and whether it can be used."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loopwright.cli.options import progress_bar
from loopwright.core.errors import storage
from loopwright.execution.sandbox import sandbox_of
from loopwright.reports.export import parquet_modules
from loopwright.rollouts.tasks.harbor.cache import write_parquet
from loopwright.rollouts.tasks.harbor.check import TaskCheck, check_tasks
from loopwright.rollouts.tasks.harbor.source import TaskDirectory, dataset_row, default_split
from loopwright.rollouts.tasks.harbor.source import scan as scan_directory

app = typer.Typer(help="List and check directories of tasks.", no_args_is_help=True)
_SUFFIXES = (".parquet", ".jsonl")


@app.command("scan")
def scan(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Harbor tasks, at any depth below it.")],
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the good ones as a dataset: tasks.parquet or tasks.jsonl."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Their data_source; by default the directory's.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", metavar="NAME", help="`train` or `validation`; by default from the directory's name."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Run the tests on the initial state, on what solution/solve.sh does, and on some tricks."
        ),
    ] = False,
    sandbox: Annotated[
        str, typer.Option("--sandbox", metavar="NAME", help="For --check: none, bwrap or docker.")
    ] = "none",
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", metavar="N", min=1, help="For --check: how many tasks at a time.")
    ] = 4,
) -> None:
    """List the tasks and everything that is wrong with them; exits with 2 if anything is."""
    if output is not None and output.suffix not in _SUFFIXES:
        raise typer.BadParameter(f"{output}: a dataset ends in {' or '.join(_SUFFIXES)}.", param_hint="--output")
    entries = list(scan_directory(directory))
    checks = _run_checks([each for each in entries if each.task is not None], sandbox, jobs) if check else {}
    _show(entries, checks)
    problems = [each.problem for each in entries if each.task is None]
    problems += [f"{id}: {problem}" for id, done in checks.items() for problem in done.problems]
    for problem in problems:
        typer.echo(problem, err=True)
    for each in entries:
        if each.needs_docker and each.id not in checks:
            typer.echo(each.needs_docker, err=True)
    good = [each for each in entries if each.task is not None and not (each.id in checks and checks[each.id].problems)]
    if output is not None and good:
        _write(good, directory, name, split, output)
        typer.echo(f"wrote {len(good)} tasks to {output}")
    if not entries:
        typer.echo(f"no task found in {directory}: a task is a directory with task.toml and instruction.md", err=True)
    raise typer.Exit(2 if problems or not entries else 0)


def _run_checks(entries: Sequence[TaskDirectory], sandbox: str, jobs: int) -> Mapping[str, TaskCheck]:
    async def main() -> dict[str, TaskCheck]:
        checks = {}
        with progress_bar("running tests", len(entries), hidden=False) as advance:
            async for each in check_tasks(entries, place, jobs=jobs):
                checks[each.directory.id] = each
                advance(1)
        return {each.id: checks[each.id] for each in entries}

    place = sandbox_of(sandbox)
    place.check()
    return asyncio.run(main())


def _show(entries: Sequence[TaskDirectory], checks: Mapping[str, TaskCheck]) -> None:
    results = ("initial", "solved", "tricks") if checks else ()
    columns = ("task", "difficulty", "steps", "tests", "solution", *results)
    table = Table(*columns, box=None, padding=(0, 1), pad_edge=False)
    for each in entries:
        task = each.task
        if task is None:
            table.add_row(escape(each.id), "[red]unusable[/red]")
            continue
        solved = task.solution(task.steps[0]) is not None
        facts = [str(task.metadata.get("difficulty", "")), str(len(task.steps)), _yes(task.has_tests), _yes(solved)]
        if done := checks.get(each.id):
            facts += [_reward(done.initial), _reward(done.solved), ", ".join(done.fooled_by) or "none"]
        table.add_row(escape(each.id), *map(escape, facts))
    if entries:
        Console(highlight=False).print(table)
        good = sum(each.task is not None for each in entries)
        facts = [f"{len(entries)} tasks"]
        if good < len(entries):
            facts.append(f"{len(entries) - good} of them unusable")
        if count := sum(bool(each.needs_docker) for each in entries):
            facts.append(f'{count} only with sandbox = "docker"')
        typer.echo(", ".join(facts))


def _yes(there: bool) -> str:
    return "yes" if there else "no"


def _reward(verdict: Mapping[str, Any] | None) -> str:
    if verdict is None:
        return ""
    if "error" in verdict:
        return "broken"
    rewards = verdict["rewards"]
    return ", ".join(f"{value:g}" if list(rewards) == ["reward"] else f"{n} {value:g}" for n, value in rewards.items())


def _write(entries: Sequence[TaskDirectory], root: Path, name: str | None, split: str | None, output: Path) -> None:
    label, part = name or root.resolve().name, split or default_split(root)
    tasks = [(each, each.task) for each in entries if each.task is not None]
    rows = [dataset_row(each, task, index, label, part) for index, (each, task) in enumerate(tasks)]
    with storage(output, then="nothing was written"):
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.suffix == ".jsonl":
            output.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))
            return
        pa, _ = parquet_modules()
        write_parquet(pa.Table.from_pylist(rows), output)
