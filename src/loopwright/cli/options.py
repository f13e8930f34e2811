"""What several verbs share: options, values, JSON lines, lines of text and a progress bar."""

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from loopwright.core.errors import printable

OutputArgument = Annotated[Path, typer.Argument(metavar="OUTPUT", help="The output directory of an earlier run.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Write one JSON object per trial and event, for scripts.")]
RunOption = Annotated[str | None, typer.Option("--run", metavar="NAME", help="Which run, if there are several.")]

GroupOption = Annotated[
    int | None, typer.Option("--group", metavar="N", min=1, help="Only the rollouts of this group.")
]
TaskOption = Annotated[str | None, typer.Option("--task", metavar="ID", help="Only the rollouts of this task.")]


def assignment(text: str, option: str) -> tuple[str, Any]:
    """NAME=VALUE of an option; the value is JSON or text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"{text!r} has no value. Write {option} NAME=VALUE.", param_hint=option)
    return name, json_or_text(value)


def json_or_text(text: str) -> Any:
    """A value of the command line: JSON, or else text."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def emit(event: dict[str, Any]) -> None:
    """Write an event as a line of JSON, at once."""
    sys.stdout.buffer.write(orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY))
    sys.stdout.buffer.flush()


@contextmanager
def progress_bar(label: str, total: int, *, hidden: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr if that is a terminal; call what it yields with how much is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(label), BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=hidden or not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)


def show(line: str, indent: int = 0) -> None:
    """Print a line of text. A terminal that is too narrow for it gets it in parts, which three spaces separate."""
    line, width = printable(line), shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or indent + len(line) <= width:
        print(" " * indent + line)
        return
    first, *rest = line.split("   ")
    for part, margin in [(first, indent), *((part, indent + 4) for part in rest)]:
        print(
            textwrap.fill(
                part,
                width,
                initial_indent=" " * margin,
                subsequent_indent=" " * (margin + 4),
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
