"""Options that several verbs share."""

from pathlib import Path
from typing import Annotated, Any

import typer

ScenarioFile = Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario, one TOML file.")]
OutputArgument = Annotated[Path, typer.Argument(metavar="OUTPUT", help="The output directory of an earlier run.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but the result.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Write one JSON object per trial and event, for scripts.")]
RunOption = Annotated[
    str | None, typer.Option("--run", metavar="NAME", help="The run, where several of the output made rollouts.")
]

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key, such as system.parallel=4 or run.agent.trials=100; loop.KEY and gateway.KEY are those "
        "of remote loops. VALUE is JSON or text. May be repeated.",
    ),
]


def overrides_of(texts: list[str] | None) -> dict[str, Any]:
    """The overrides of `--set` options, by dotted key."""
    from loopwright.scenario.overrides import parse_assignments

    try:
        return parse_assignments(texts or ())
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from error


def assignment(text: str, option: str) -> tuple[str, Any]:
    """NAME=VALUE of an option; the value is JSON, or text."""
    import orjson

    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"{text!r} gives nothing a value. Write {option} NAME=VALUE.", param_hint=option)
    try:
        return name, orjson.loads(value)
    except orjson.JSONDecodeError:
        return name, value


def emit(event: dict[str, Any]) -> None:
    """Write an event as a line of JSON, at once."""
    import sys

    import orjson

    sys.stdout.buffer.write(orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE))
    sys.stdout.buffer.flush()
