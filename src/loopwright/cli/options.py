"""Options that several verbs share."""

import sys
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

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
    try:
        return name, orjson.loads(value)
    except orjson.JSONDecodeError:
        return name, value


def emit(event: dict[str, Any]) -> None:
    """Write an event as a line of JSON, at once."""
    sys.stdout.buffer.write(orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY))
    sys.stdout.buffer.flush()
