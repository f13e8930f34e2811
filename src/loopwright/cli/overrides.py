"""The `--set` option of the verbs that load a scenario."""

from typing import Annotated, Any

import typer

from loopwright.scenario.overrides import parse_assignments

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
    try:
        return parse_assignments(texts or ())
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from error
